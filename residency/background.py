"""Threads that work in small portions and can be held between two of them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from ziggurat.residency.host_places import HostPlaces


class BackgroundThread(ABC):
    """Subclasses write `_work`, which asks `_begin` before each portion and calls `_end` after it."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._pauses = 0
        self._working = False
        self._stop = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the thread is idle: no portion is in progress and none begins. May be nested."""
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
        """Until the thread has done what it can."""
        self._thread.join()

    def close(self) -> None:
        """Stop after the portion in progress and join. May be called twice."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @abstractmethod
    def _work(self) -> None:
        """What the thread runs."""

    def _idle(self) -> bool:
        """Whether there is nothing to do right now. Asked under the lock `_changed`."""
        return False

    def _begin(self) -> bool:
        """Wait until work may go on and there is some; False when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or (self._pauses == 0 and not self._idle()))
            self._working = not self._stop
            return self._working

    def _end(self) -> None:
        with self._changed:
            self._working = False
            self._changed.notify_all()


class CacheThread(BackgroundThread):
    """One that also waits for what happens to a host cache, outside of its portions: its end wakes it there."""

    def __init__(self, name: str, cache: HostPlaces) -> None:
        super().__init__(name)
        self._waits_at = cache

    def close(self) -> None:
        with self._changed:
            self._stop = True
        self._waits_at.wake()
        super().close()


class ReadingThread(CacheThread):
    """Reads into a host cache whenever somebody has said that there is something to read. Subclasses write `_read`, one
    portion, and `_idle`; they call `_wanted_something`."""

    def _wanted_something(self) -> None:
        """There is something to read: the thread begins with the first of it. Under the lock `_changed`."""
        if self._thread.ident is None and not self._stop:
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while self._begin():
            try:
                self._read()
            finally:
                self._end()
            self._wait()

    @abstractmethod
    def _read(self) -> None:
        """Read a portion."""

    def _wait(self) -> None:
        """Until the next portion has a chance, if that is not at once. It ends when the cache wakes those who wait and
        `_stop` is set."""
