"""Reading rows into the arena that are likely to be wanted there, beside the steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from ziggurat.residency.background import BackgroundThread
from ziggurat.residency.host_cache import FillReport
from ziggurat.residency.inline.cache import InlineCache


class Promoter(BackgroundThread):
    """Brings rows that were asked for with `want` in the place of colder ones, `batch` at a time, hottest first.

    heat_of: heat of a row key now. report: called in the thread after every batch. A row that is not hotter than what
    would have to leave is forgotten, and so is one that cannot be read.
    """

    def __init__(
        self,
        cache: InlineCache,
        heat_of: Callable[[int], float],
        batch: int,
        report: Callable[[FillReport], None],
    ) -> None:
        super().__init__("ziggurat-promote")
        self._cache = cache
        self._heat_of = heat_of
        self._batch = batch
        self._report = report
        self._wanted: set[int] = set()

    def want(self, keys: Iterable[int]) -> None:
        """Rows that have left the pool, or that somebody missed. The thread starts with the first of them."""
        with self._changed:
            self._wanted.update(keys)
            if not self._wanted:
                return
            if self._thread.ident is None and not self._stop:
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stop = True
        self._cache.wake()
        super().close()

    def _idle(self) -> bool:
        return not self._wanted

    def _work(self) -> None:
        while self._begin():
            try:
                waiting = self._promote()
            finally:
                self._end()
            if waiting:
                self._cache.wait_for_place(lambda: self._stop)

    def _promote(self) -> bool:
        """Bring the hottest rows; whether some of them wait for a place that passes may still read."""
        with self._changed:
            ranked = heapq.nlargest(self._batch, ((self._heat_of(key), -key) for key in self._wanted))
        hottest = [(-key, heat) for heat, key in ranked]
        report = self._cache.promote(hottest, self._heat_of, self._batch)
        self._report(report)
        if report.full and self._cache.resting:
            return True
        with self._changed:
            self._wanted.difference_update(key for key, _ in hottest)
        return False
