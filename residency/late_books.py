"""Booking what nobody waited for, when no further step comes along to do it."""

from __future__ import annotations

import threading
from collections.abc import Callable

QUIET_SECONDS = 0.05


class LateBooks:
    """A thread that calls `collect` a moment after `nudge`, and again for as long as it says that something is left.

    lock: held during the call; whoever holds it keeps the thread from looking at the device. What `collect` raises is
    kept for `take_error`.
    """

    def __init__(self, collect: Callable[[], bool], lock: threading.RLock) -> None:
        self._collect = collect
        self._lock = lock
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def nudge(self) -> None:
        """Something was put off."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ziggurat-books", daemon=True)
            self._thread.start()
        self._wake.set()

    def take_error(self) -> Exception | None:
        """What the thread ran into, once."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop.wait(QUIET_SECONDS):
                return
            try:
                with self._lock:
                    left = self._collect()
            except Exception as error:  # noqa: BLE001  # raised where somebody listens: in the next step
                self._error = error
                return
            if left:
                self._wake.set()
