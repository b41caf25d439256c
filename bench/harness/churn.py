"""Thousands of steps while a thread evicts rows from the arena and reads others into it: every bit as if resident."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from bench.harness.measure import run_steps, start_anew, warmed
from bench.harness.memory import SharedMemory
from bench.harness.routing import synthetic
from bench.harness.rows import MemoryPack
from bench.harness.stack import Stack
from bench.shapes import MoeShape
from ziggurat.residency.service import StepTokens

#: Rows of 0.4 MiB: large enough that a gather takes a while, small enough for thousands of steps.
SHAPE = MoeShape("churned", 6, 64, 6, 1024, 512)
_DIFFERENT = 64  # steps, which come again and again
_TOKENS = 4
_WARM = 8
_ABSENT = 12  # rows that the arena has no place for: some steps find everything, others do not


def churn(
    device: torch.device,
    codec: str,
    steps: int,
    *,
    left: Callable[[], float],
    shape: MoeShape = SHAPE,
    distinct: int = 256,
) -> dict[str, Any]:
    """A pool of a quarter of the rows over an arena that lacks a few. left: seconds for more; it stops without any."""
    started = time.perf_counter()
    routing = synthetic(
        _DIFFERENT + _WARM, shape.layers, shape.experts, shape.top_k, _TOKENS, zipf=1.1, drift=0.3
    )
    stack = Stack(routing, shape.hidden, device)
    pack = MemoryPack(shape, codec, distinct)
    graph = device.type == "cuda"
    outcomes: Counter[str] = Counter()
    with SharedMemory(shape, pack, device, _TOKENS) as memory:
        with memory.service(shape.rows, "auto") as service:
            full = run_steps(service, stack, routing, warm=_WARM, graph=graph)
        expected = torch.stack(full.outputs)
        # Counted on the device: comparing must not slow steps down to where nothing overlaps.
        different = torch.zeros((), dtype=torch.int64, device=device)
        with memory.service(shape.rows // 4, "inline", places=shape.rows - _ABSENT) as service:
            start_anew(service)
            forward = warmed(service, stack, routing, _WARM, graph=graph)
            done = 0
            with service.churn(seed=1) as thread:
                while done < steps and left() > 0:
                    number = done % _DIFFERENT
                    stack.load(_WARM + number)
                    result = service.run_step(forward, StepTokens(_TOKENS))
                    outcomes[result.outcome] += 1
                    different += (result.value.view(torch.int16) != expected[number].view(torch.int16)).any()
                    done += 1
            service.collect()
            rows = int(service.metrics.value("ziggurat_inline_rows_total"))
            absent = int(service.metrics.value("ziggurat_arena_misses_total"))
    return {
        "layers": shape.layers,
        "experts": shape.experts,
        "row_kib": round(pack.header.stride / 1024, 1),
        "tokens": _TOKENS,
        "steps": done,
        "wanted_steps": steps,
        "steps_with_other_bits": int(different),
        "outcomes": dict(sorted(outcomes.items())),
        "rows_fetched_by_the_device": rows,
        "rows_missing_in_the_arena": absent,
        "evicted_from_the_arena": thread.evicted,
        "read_into_the_arena": thread.filled,
        "seconds": round(time.perf_counter() - started, 1),
    }
