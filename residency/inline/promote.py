"""Reading rows into the arena that are likely to be wanted there, beside the steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from ziggurat.residency.background import ReadingThread
from ziggurat.residency.host_cache import FillReport
from ziggurat.residency.inline.cache import InlineCache


class Promoter(ReadingThread):
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
        super().__init__("ziggurat-promote", cache)
        self._cache = cache
        self._heat_of = heat_of
        self._batch = batch
        self._report = report
        self._wanted: set[int] = set()
        self._short = False  # whether some rows wait for a place that passes may still read

    def want(self, keys: Iterable[int]) -> None:
        """Rows that have left the pool, or that somebody missed. The thread starts with the first of them."""
        with self._changed:
            self._wanted.update(keys)
            if self._wanted:
                self._wanted_something()

    def _idle(self) -> bool:
        return not self._wanted

    def _wait(self) -> None:
        if self._short:
            self._cache.wait_for_place(lambda: self._stop)

    def _read(self) -> None:
        with self._changed:
            ranked = heapq.nlargest(self._batch, ((self._heat_of(key), -key) for key in self._wanted))
        hottest = [(-key, heat) for heat, key in ranked]
        report = self._cache.promote(hottest, self._heat_of, self._batch)
        self._report(report)
        self._short = report.full and self._cache.resting > 0
        if not self._short:
            with self._changed:
                self._wanted.difference_update(key for key, _ in hottest)
