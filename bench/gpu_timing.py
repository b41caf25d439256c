"""Times device work by replaying it as a CUDA graph, and measures the rates that bound it. Needs a CUDA device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.kernel_names import short_name

Work = Callable[[], object]


class Span(NamedTuple):
    """A kernel's run: microseconds, `start` since some moment that all spans of a trace share."""

    name: str
    start: float
    us: float

    @property
    def end(self) -> float:
        return self.start + self.us


def captured(work: Sequence[Work]) -> torch.cuda.CUDAGraph:
    """One graph that runs each of `work` once, in order; each has run twice before, so that everything is loaded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for one in work:
                one()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in work:
            one()
    return graph


def replay_us(
    graph: torch.cuda.CUDAGraph, pieces: int, *, repeats: int = 15, budget_ms: float = 400.0
) -> float:
    """Microseconds of one of the graph's `pieces`: the median over replays, of which as many run as the budget allows.

    At least three replays are timed, whatever they take.
    """
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 3 or (len(times) < repeats and sum(times) < budget_ms):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times) * 1e3 / pieces


def spans_of(graph: torch.cuda.CUDAGraph) -> list[Span]:
    """Every kernel and copy of one replay, in the order of their starts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    return device_spans(profiled.events() or ())


def device_spans(events: Iterable[Any]) -> list[Span]:
    """What ran on the device, of a profile's events, in the order of their starts."""
    found = [
        Span(short_name(event.name), float(event.time_range.start), float(event.device_time))
        for event in events
        if str(event.device_type).endswith("CUDA")
    ]
    return sorted(found, key=lambda span: span.start)


def kernel_split(spans: Sequence[Span], pieces: int) -> dict[str, float]:
    """Microseconds of each kernel in one of a graph's pieces, by kernel name; launch gaps are in none of them."""
    total: dict[str, float] = defaultdict(float)
    for span in spans:
        total[span.name] += span.us
    return {name: round(us / pieces, 3) for name, us in sorted(total.items(), key=lambda item: -item[1])}


def measured_rates(device: torch.device, gib: float = 4.0) -> dict[str, float]:
    """What the device reaches: reading memory, copying within it (bytes read plus written), bfloat16 products.

    Keys: read_tb_per_s, copy_tb_per_s, matmul_tflops.
    """
    size = int(gib * 2**30)
    source = torch.randint(-(2**63), 2**63 - 1, (size // 8,), device=device).view(torch.uint8)
    copy_us = _copy_us(source)
    read_us = min(_read_us(source), _sum_us(source))
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul_us = replay_us(captured([lambda: torch.mm(a, b, out=product)]), 1)
    return {
        "read_tb_per_s": round(size / read_us / 1e6, 3),
        "copy_tb_per_s": round(2 * size / copy_us / 1e6, 3),
        "matmul_tflops": round(2 * n**3 / matmul_us / 1e6, 1),
    }


def _copy_us(source: torch.Tensor) -> float:
    target = torch.empty_like(source)
    return replay_us(captured([lambda: target.copy_(source)]), 1)


def _sum_us(source: torch.Tensor) -> float:
    numbers = source.view(torch.int32)
    return replay_us(captured([lambda: numbers.sum(dtype=torch.int32)]), 1)


def _read_us(source: torch.Tensor) -> float:
    """A kernel that reads everything and writes next to nothing; infinite where Triton cannot build it."""
    try:
        from bench.triton_read import read_all

        return replay_us(captured([lambda: read_all(source)]), 1)
    except Exception as error:  # noqa: BLE001 - whatever Triton raises, torch's own sum is measured, too
        print(f"read kernel: {type(error).__name__}: {error}")
        return float("inf")
