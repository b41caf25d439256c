"""Passes that nobody waits for: what they have counted is brought to the host later, for many of them at once.

The counts on the device only grow, so one copy of them serves all passes since the one before, and a pass by itself
costs the host nothing: no copy, no event. Copies are asked for every now and then by the thread that books, and by the
thread that runs passes when there have been many, or when the device's log of them might not hold more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ziggurat.residency.passes import IntArray
from ziggurat.residency.transfers import Download

_SPARE = 3  # buffers that are at hand; page-locked memory is slow to get
_MOST_PASSES = 256  # of a copy


@dataclass(frozen=True, slots=True)
class LateCounts:
    """What steps that nobody waited for have counted together. pairs: int64 [L, E].

    missed: pairs whose expert the device had to fetch. fetching: steps that had such.
    """

    steps: int
    pairs: IntArray
    missed: int = 0
    fetching: int = 0


@dataclass(slots=True)
class Brought:
    """A copy of the counts. passes: launched since the one before. epoch: see `begun`."""

    counts: Download
    passes: int
    epoch: int | None


class LatePasses:
    """make: a new buffer for a copy. take: queue the copy into it behind the passes, in any thread.

    `begun`, `launched` and `abandon` are for the thread that runs passes, `ask` for any, `arrived` and `give_back` for
    one at a time.
    """

    def __init__(self, make: Callable[[], Download], take: Callable[[Download], None]) -> None:
        self._make = make
        self._take = take
        self._lock = threading.Lock()
        self._under_way: deque[Brought] = deque()
        self._spare = [make() for _ in range(_SPARE)]
        self._launched = 0  # passes since the last copy was asked for
        self._launching = False
        self._epoch: int | None = None

    @property
    def waiting(self) -> bool:
        """Whether some pass's counts have not been handed out."""
        return bool(self._launched or self._under_way)

    @property
    def copies(self) -> int:
        """Copies that have been asked for and not been handed out."""
        return len(self._under_way)

    @property
    def interrupted(self) -> bool:
        """Whether a pass has begun and not been launched."""
        return self._launching

    def begun(self, open_epoch: Callable[[], int] | None = None) -> None:
        """A pass is about to be launched. open_epoch: called unless an earlier pass's epoch serves for this one, too;
        the epoch comes back with the copy that is behind all passes of it."""
        with self._lock:
            self._launching = True
            if self._epoch is None and open_epoch is not None:
                self._epoch = open_epoch()

    def launched(self) -> None:
        """That pass is in the device's queue."""
        self._launched += 1
        self._launching = False
        if self._launched >= _MOST_PASSES:
            self.ask()

    def abandon(self) -> int | None:
        """That pass raised on its way. The epoch that it began under is the caller's to close."""
        with self._lock:
            self._launching = False
            epoch, self._epoch = self._epoch, None
        return epoch

    def ask(self) -> None:
        """Have the counts of all launched passes brought; not while one is being launched: parts of it would come."""
        with self._lock:
            if self._launching or not self._launched:
                return
            counts = self._spare.pop() if self._spare else self._make()
            self._take(counts)
            self._under_way.append(Brought(counts, self._launched, self._epoch))
            self._launched, self._epoch = 0, None

    def arrived(self, *, wait: bool) -> list[Brought]:
        """Copies in order; with `wait` all that were asked for. To be given back when their words have been read."""
        found: list[Brought] = []
        while self._under_way and (wait or self._under_way[0].counts.arrived()):
            found.append(self._under_way.popleft())
        return found

    def give_back(self, copies: list[Brought]) -> None:
        """Their buffers can be used again."""
        self._spare += [one.counts for one in copies]
