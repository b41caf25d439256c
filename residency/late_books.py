"""Booking what nobody waited for: away from the steps, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

QUIET_SECONDS = 0.2


class LateBooks:
    """A thread that calls `book` a moment after `nudge`, and again for as long as that says that something is left.

    What `book` raises ends the thread and is kept for `raise_error`.
    """

    def __init__(self, book: Callable[[], bool]) -> None:
        self._book = book
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def nudge(self) -> None:
        """Something was put off."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ziggurat-books", daemon=True)
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def raise_error(self) -> None:
        """Raise what the thread ran into, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._stop.wait(QUIET_SECONDS):
                return
            # Cleared before it books: what is put off from here on wakes it again. An end that was announced just
            # before may have been cleared with it.
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                if self._book():
                    self._wake.set()
            except Exception as error:  # noqa: BLE001  # raised where somebody listens: in the next step
                self._error = error
                return
