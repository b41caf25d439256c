"""Reading rows before somebody waits for them: those that heat says are missing, those that a scan comes to next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ziggurat.residency.background import ReadingThread
from ziggurat.residency.host_cache import FillReport, HostCache

EVERY_STEPS = 256
"""Steps between two looks at the heat."""
MOST_BATCHES = 8
"""Batches read after one look: what heat says changes slowly, and the disk is there for those who wait."""


class HeatReader(ReadingThread):
    """Reads the hottest absent rows into free places of the arena, and in the place of colder ones that nobody has used
    since they came: a scan's, or those of an earlier start. A used row is the policy's to judge, which knows better.

    Every now and then it looks at the heat; it reads `batch` rows at a time, never while a step reads, and stops when
    there is no such place. hottest(n): up to n (key, heat) of rows that neither arena nor pool has, hottest first.
    heat_of: heat of a row key. report: called in the thread after every batch.
    """

    def __init__(
        self,
        cache: HostCache,
        hottest: Callable[[int], Sequence[tuple[int, float]]],
        heat_of: Callable[[int], float],
        batch: int,
        report: Callable[[FillReport], None],
    ) -> None:
        super().__init__("ziggurat-heat", cache)
        self._cache = cache
        self._hottest = hottest
        self._heat_of = heat_of
        self._batch = batch
        self._report = report
        self._steps = 0
        self._batches = 0  # left to read after the last look

    def passed(self, steps: int) -> None:
        """Steps have passed. The thread starts when there is something to look at."""
        with self._changed:
            self._steps += steps
            if self._steps < EVERY_STEPS or not self._cache.replaceable:
                return
            self._steps = 0
            self._batches = MOST_BATCHES
            self._wanted_something()

    def _idle(self) -> bool:
        return not self._batches

    def _wait(self) -> None:
        self._cache.wait_until_idle(lambda: self._stop)

    def _read(self) -> None:
        report = self._cache.promote(
            self._hottest(self._batch), self._heat_of, self._batch, displaces_used=False
        )
        self._report(report)
        with self._changed:
            self._batches = self._batches - 1 if report.read else 0


class EarlyReader(ReadingThread):
    """Reads the rows that a streamed pass comes to next, into staging places that nothing else needs right now, so that
    the disk works while a part is computed with.

    spare: staging places left to those who wait. report: as above.
    """

    def __init__(self, cache: HostCache, spare: int, report: Callable[[FillReport], None]) -> None:
        super().__init__("ziggurat-early", cache)
        self._cache = cache
        self._spare = spare
        self._report = report
        self._wanted: Sequence[int] = ()
        self._reads = False  # whether something was wanted in this pass

    def want(self, keys: Sequence[int]) -> None:
        """What comes next, in order, instead of what was said before; nothing: the pass is over."""
        absent = [key for key in keys if not self._cache.holds(key)]
        if self._spare >= self._cache.staging or not (absent or self._reads):
            return
        with self._changed:
            self._wanted = absent
            self._reads = bool(keys)
            if absent:
                self._wanted_something()
        if not keys:
            with self.paused():
                self._cache.forget_early()

    def _idle(self) -> bool:
        return not self._wanted

    def _read(self) -> None:
        with self._changed:
            wanted = self._wanted
        report = self._cache.read_early(wanted, self._spare)
        self._report(report)
        with self._changed:
            if self._wanted is wanted:
                self._wanted = ()  # until somebody has taken one of them and says what comes then
