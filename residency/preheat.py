"""Filling the arena in the background, hottest rows first, out of the way of steps and graph capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ziggurat.residency.background import BackgroundThread
from ziggurat.residency.host_cache import FillReport, HostCache


class Preheater(BackgroundThread):
    """A thread that fills free places of a host cache in batches of `batch` rows, until none is free.

    report: called in the thread after every batch.
    """

    def __init__(
        self,
        cache: HostCache,
        wanted: Sequence[tuple[int, float]],
        batch: int,
        report: Callable[[FillReport], None],
    ) -> None:
        super().__init__("ziggurat-preheat")
        self._cache = cache
        self._wanted = wanted
        self._batch = batch
        self._report = report

    def _work(self) -> None:
        done = 0
        while done < len(self._wanted) and self._begin():
            try:
                batch = self._wanted[done : done + self._batch]
                report = self._cache.fill(batch, self._batch)
                self._report(report)
            finally:
                self._end()
            if report.full:
                return
            done += self._batch
