"""The GPU behind `bench/transfers.py`: an arena, a buffer on the device, and movers between them."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch

from bench.transfers import BATCHED, GATHER, GIB, SINGLE
from ziggurat.allocators.lanes import CudaLane
from ziggurat.allocators.movers import BatchedCopies, RowMover, SingleCopies
from ziggurat.allocators.opening import arena_node
from ziggurat.allocators.pinned import PinnedArena
from ziggurat.allocators.topology import gpus, visible_gpus

PAGE = 4096
PLACE = 1 << 20
CHUNK = (
    128 << 20
)  # registered at a time; no row and no large copy here crosses from one to the next, as none does in use
PIN_REPEATS = 2


def gpu_facts() -> dict[str, Any]:
    """What a transfer depends on; no serial numbers."""
    survey = gpus()
    facts: dict[str, Any] = {"name": torch.cuda.get_device_name(0), "driver": survey.driver}
    for gpu in visible_gpus(survey)[:1]:
        link = gpu.link
        facts["numa_node"] = gpu.numa_node
        facts["pcie"] = None if link is None else f"generation {link.generation} x{link.width}"
    return facts


def pinning(nbytes: int, tell: Callable[[str], None]) -> tuple[dict[str, Any], PinnedArena]:
    """How long it takes to have `nbytes` of locked memory: torch's way and an arena's. The last arena is returned.

    A virtual machine may get its memory when it first uses it, which is neither's doing: all of it is used once before.
    """
    torch.zeros(1, device="cuda:0")
    node = arena_node("gpu-local", 0)
    began = time.perf_counter()
    _arena(nbytes, node.node).close()
    first = time.perf_counter() - began
    seconds: dict[str, list[float]] = {"arena": [], "torch": []}
    arena: PinnedArena | None = None
    for _ in range(PIN_REPEATS):
        if arena is not None:
            arena.close()
            del arena
        began = time.perf_counter()
        block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        seconds["torch"].append(time.perf_counter() - began)
        del block
        _empty_host_cache()
        began = time.perf_counter()
        arena = _arena(nbytes, node.node)
        seconds["arena"].append(time.perf_counter() - began)
    assert arena is not None
    record = {
        "gib": nbytes / GIB,
        "numa_node": node.node,
        "threads": min(16, len(os.sched_getaffinity(0))),
        "first_use_s": round(first, 3),
        **{f"{name}_s": [round(one, 3) for one in found] for name, found in seconds.items()},
        "torch_to_arena": round(median(seconds["torch"]) / median(seconds["arena"]), 2),
    }
    tell(f"pinning: {record}")
    return record, arena


def _arena(nbytes: int, node: int | None) -> PinnedArena:
    return PinnedArena(nbytes // PLACE, PLACE, node=node, chunk_bytes=CHUNK)


def _empty_host_cache() -> None:
    # torch keeps freed locked memory; without a way to empty that cache the second round would measure it.
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


class CudaLink:
    """A `Link` over the first GPU. Rows are scattered over the arena and over the buffer, so that nothing merges."""

    def __init__(self, arena: PinnedArena, most: int, tell: Callable[[str], None]) -> None:
        device = torch.device("cuda:0")
        self._arena = arena
        self._source = arena.tensor.data_ptr()
        # Each page says where it is, so that `check` sees a row that went astray.
        arena.tensor.view(-1).view(torch.int64)[:: PAGE // 8] = torch.arange(arena.nbytes // PAGE)
        self._target = torch.empty(2 * most, dtype=torch.uint8, device=device)
        self._lane = CudaLane(device)
        self._lane.follow_current()
        self._stream = torch.cuda.ExternalStream(self._lane.handle, device=device)
        self._movers: dict[str, RowMover] = {
            SINGLE: SingleCopies(),
            BATCHED: BatchedCopies(overlap=True),
            "batched_no_overlap": BatchedCopies(overlap=False),
        }
        gather = _gather(tell)
        if gather is not None and arena.device_pointer == self._source:
            self._movers[GATHER] = gather
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @property
    def movers(self) -> Sequence[str]:
        return tuple(self._movers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        self._arena.close()

    def _timed(self, work: Callable[[], None]) -> float:
        self._stream.synchronize()
        self._start.record(self._stream)
        work()
        self._end.record(self._stream)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def peak(self) -> tuple[int, float]:
        nbytes = min(CHUNK, self._target.numel())
        copy = functools.partial(
            self._movers[SINGLE].move, [self._target.data_ptr()], [self._source], [nbytes], self._lane.handle
        )
        return nbytes, self._timed(copy)

    @functools.cache  # noqa: B019  # one object for one run
    def _rows(self, row_bytes: int, rows: int) -> tuple[list[int], list[int], list[int]]:
        """Targets, sources and sizes: every other place at most, in an order of its own at both ends."""
        generator = torch.Generator().manual_seed(row_bytes + rows)
        in_chunk = CHUNK // row_bytes
        places = [
            chunk * CHUNK + one * row_bytes
            for chunk in range(self._arena.nbytes // CHUNK)
            for one in range(0, in_chunk, 2)
        ]
        slots = self._target.numel() // row_bytes // 2
        start = [places[one] for one in torch.randperm(len(places), generator=generator)[:rows].tolist()]
        to = torch.randperm(slots, generator=generator)[:rows].tolist()
        assert len(start) == len(to) == rows
        return (
            [self._target.data_ptr() + 2 * row_bytes * one for one in to],
            [self._source + one for one in start],
            [row_bytes] * rows,
        )

    def move(self, mover: str, row_bytes: int, rows: int, calls: int) -> float:
        to, start, size = self._rows(row_bytes, rows)
        move, stream = self._movers[mover].move, self._lane.handle

        def work() -> None:
            for _ in range(calls):
                move(to, start, size, stream)

        return self._timed(work)

    def check(self) -> None:
        """Every mover brings the right bytes. RuntimeError if one does not."""
        row_bytes, rows = 256 << 10, 16
        for name in self.movers:
            self._target.fill_(0xFF)
            torch.cuda.synchronize()
            self.move(name, row_bytes, rows, 1)
            to, start, _ = self._rows(row_bytes, rows)
            for target, source in zip(to, start, strict=True):
                there, here = target - self._target.data_ptr(), source - self._source
                got = self._target[there : there + row_bytes].cpu()
                wanted = self._arena.tensor.view(-1)[here : here + row_bytes]
                if not torch.equal(got, wanted):
                    raise RuntimeError(f"{name} did not bring the row at {here}")


def _gather(tell: Callable[[str], None]) -> RowMover | None:
    try:
        module = importlib.import_module("ziggurat.kernels.cuda.gather")
        kernel: RowMover = module.GatherKernel(0)
    except (ImportError, RuntimeError) as error:
        tell(f"no gather kernel: {error}")
        return None
    return kernel
