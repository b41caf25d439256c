"""Filling the arena in the background, hottest rows first, out of the way of steps and graph capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ziggurat.residency.background import BackgroundThread
from ziggurat.residency.host_cache import FillReport, HostCache

logger = logging.getLogger(__name__)

_SAY_EVERY = 10.0  # seconds


class Preheater(BackgroundThread):
    """A thread that fills free places of a host cache in batches of `batch` rows, until none is free.

    report: called in the thread after every batch. left: called with how many rows may still come, 0 in the end.
    """

    def __init__(
        self,
        cache: HostCache,
        wanted: Sequence[tuple[int, float]],
        batch: int,
        report: Callable[[FillReport], None],
        left: Callable[[int], None] = lambda rows: None,
    ) -> None:
        super().__init__("ziggurat-preheat")
        self._cache = cache
        self._wanted = wanted
        self._batch = batch
        self._report = report
        self._left = left

    def _work(self) -> None:
        begun = self._said = time.monotonic()
        self._progress(0)
        self._fill()
        self._left(0)
        logger.info("the arena holds %d rows after %.1f s", self._cache.used, time.monotonic() - begun)

    def _progress(self, done: int) -> None:
        left = min(len(self._wanted) - done, self._cache.capacity - self._cache.used)
        self._left(left)
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY:
            self._said = now
            logger.info("preheating the arena: %d rows are there, up to %d to come", self._cache.used, left)

    def _fill(self) -> None:
        done = 0
        while done < len(self._wanted) and self._begin():
            try:
                batch = self._wanted[done : done + self._batch]
                report = self._cache.fill(batch, self._batch)
                self._report(report)
                self._progress(done + len(batch))
            finally:
                self._end()
            if report.full:
                return
            done += self._batch
