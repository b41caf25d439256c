"""Arenas around arenas: a byte budget, counts of what is used, and faults on demand.

An arena takes its memory when it is made, so what is wrapped is the making: each function here takes a `MakeArena` and
returns one. They compose in any order: `limiting(counting(PageableArena, stats), budget)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ziggurat.allocators.arena import HostArena, MakeArena
from ziggurat.allocators.errors import AllocationError
from ziggurat.allocators.lockers import LockRefusedError, PageLocker
from ziggurat.allocators.pages import check_geometry

__all__ = [
    "ArenaFaults",
    "ArenaStats",
    "ByteBudget",
    "FaultyLocker",
    "WrappedArena",
    "counting",
    "faulty",
    "limiting",
]


class WrappedArena:
    """A HostArena that passes everything on to `inner`; the base of those that do more."""

    def __init__(self, inner: HostArena) -> None:
        self._inner = inner

    @property
    def kind(self) -> str:
        return self._inner.kind

    @property
    def places(self) -> int:
        return self._inner.places

    @property
    def stride(self) -> int:
        return self._inner.stride

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return self._inner.tensor

    @property
    def device_pointer(self) -> int | None:
        return self._inner.device_pointer

    @property
    def share(self) -> Any:
        """The `ArenaShare` of a shared arena below, None of any other."""
        return getattr(self._inner, "share", None)

    def view(self, place: int) -> memoryview:
        return self._inner.view(place)

    def close(self) -> None:
        self._inner.close()


class ByteBudget:
    """Bytes that the arenas under it may take together. Safe for several threads."""

    def __init__(self, limit: int) -> None:
        self.limit, self._taken, self._guard = limit, 0, threading.Lock()

    @property
    def left(self) -> int:
        return self.limit - self._taken

    def take(self, nbytes: int) -> None:
        """AllocationError, with what is left, if that is less than `nbytes`."""
        with self._guard:
            if nbytes > self.left:
                advice = "lower tiers.host.size or raise the budget"
                raise AllocationError(
                    "host arena", f"the budget of {self.limit} bytes", nbytes, self.left, advice
                )
            self._taken += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._guard:
            self._taken -= nbytes


class _LimitedArena(WrappedArena):
    def __init__(self, inner: HostArena, budget: ByteBudget) -> None:
        super().__init__(inner)
        self._budget, self._taken = budget, inner.nbytes

    def close(self) -> None:
        super().close()
        taken, self._taken = self._taken, 0
        self._budget.give_back(taken)


def limiting(make: MakeArena, budget: ByteBudget) -> MakeArena:
    """Arenas whose bytes come out of `budget` before any memory is taken, and go back when they are closed."""

    def limited(places: int, stride: int) -> HostArena:
        check_geometry("host arena", places, stride)
        budget.take(places * stride)
        try:
            return _LimitedArena(make(places, stride), budget)
        except BaseException:
            budget.give_back(places * stride)
            raise

    return limited


@dataclass(slots=True)
class ArenaStats:
    """What the arenas under it were used for.

    touched, bytes_touched: places of which a view was handed out, of arenas that are open, and their bytes.
    """

    made: int = 0
    refused: int = 0
    closed: int = 0
    bytes_open: int = 0
    bytes_peak: int = 0
    views: int = 0
    touched: int = 0
    bytes_touched: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **changes: int) -> None:
        """Adds to the counts."""
        with self._guard:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)
            self.bytes_peak = max(self.bytes_peak, self.bytes_open)


class _CountedArena(WrappedArena):
    def __init__(self, inner: HostArena, stats: ArenaStats) -> None:
        super().__init__(inner)
        self._stats, self._open = stats, True
        self._touched: set[int] = set()
        stats.add(made=1, bytes_open=inner.nbytes)

    def view(self, place: int) -> memoryview:
        found = super().view(place)
        new = int(place not in self._touched)
        self._touched.add(place)
        self._stats.add(views=1, touched=new, bytes_touched=new * self.stride)
        return found

    def close(self) -> None:
        nbytes = self.nbytes
        super().close()
        if self._open:
            self._open = False
            touched = len(self._touched)
            self._stats.add(
                closed=1, bytes_open=-nbytes, touched=-touched, bytes_touched=-touched * self.stride
            )


def counting(make: MakeArena, stats: ArenaStats) -> MakeArena:
    """Arenas that count into `stats`; one that could not be made counts as refused."""

    def counted(places: int, stride: int) -> HostArena:
        try:
            inner = make(places, stride)
        except BaseException:
            stats.add(refused=1)
            raise
        return _CountedArena(inner, stats)

    return counted


@dataclass(slots=True)
class ArenaFaults:
    """Faults to inject. `make`: error by number of the arena, the first is 0; `views`: error by place.

    Both may be changed while arenas are in use.
    """

    make: Mapping[int, Exception] = field(default_factory=dict)
    views: Mapping[int, Exception] = field(default_factory=dict)
    asked: int = 0


class _FaultyArena(WrappedArena):
    def __init__(self, inner: HostArena, faults: ArenaFaults) -> None:
        super().__init__(inner)
        self._faults = faults

    def view(self, place: int) -> memoryview:
        found = super().view(place)
        if place in self._faults.views:
            raise self._faults.views[place]
        return found


def faulty(make: MakeArena, faults: ArenaFaults) -> MakeArena:
    """Arenas that fail as `faults` says: when one is made, after its memory was taken, or when a place is viewed."""

    def faulted(places: int, stride: int) -> HostArena:
        number = faults.asked
        faults.asked += 1
        inner = make(places, stride)
        if number in faults.make:
            inner.close()
            raise faults.make[number]
        return _FaultyArena(inner, faults)

    return faulted


class FaultyLocker:
    """A PageLocker that refuses some ranges: the allocation of a PinnedArena fails at the k-th chunk that is locked.

    refuse: whether the k-th call of `lock`, counted from 0, fails.
    """

    def __init__(self, inner: PageLocker, refuse: Callable[[int], bool]) -> None:
        self._inner, self._refuse = inner, refuse
        self._calls, self._guard = 0, threading.Lock()

    def lock(self, address: int, nbytes: int) -> int | None:
        with self._guard:
            number = self._calls
            self._calls += 1
        if self._refuse(number):
            raise LockRefusedError(f"injected at chunk {number}", "remove the fault")
        return self._inner.lock(address, nbytes)

    def unlock(self, address: int, nbytes: int) -> None:
        self._inner.unlock(address, nbytes)
