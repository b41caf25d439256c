"""Filling the arena in the background, hottest rows first, out of the way of steps and graph capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ziggurat.residency.host_cache import FillReport, HostCache


class Preheater:
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
        self._cache = cache
        self._wanted = wanted
        self._batch = batch
        self._report = report
        self._changed = threading.Condition()
        self._pauses = 0
        self._working = False
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="ziggurat-preheat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the thread is idle: no read of its is in progress and none begins. May be nested."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Until the thread has filled what it can."""
        self._thread.join()

    def close(self) -> None:
        """Stop after the batch in progress and join. May be called twice."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
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

    def _begin(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._pauses == 0)
            self._working = not self._stop
            return self._working

    def _end(self) -> None:
        with self._changed:
            self._working = False
            self._changed.notify_all()
