"""Reads that were given up: the kernel has not answered, and may still write to their memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from threading import Lock

#: Seconds for which whoever leaves early waits for reads that can be handed over as late ones.
GRACE = 2.0


class ReadTimeoutError(OSError):
    """A read has not returned in time. seconds: waited for. begun: False if it was not even handed to the kernel."""

    def __init__(self, path: Path, offset: int, nbytes: int, seconds: float, *, begun: bool = True) -> None:
        if begun:
            what = f"the read of {nbytes} bytes at {offset} has not returned in {seconds:.1f} s"
        else:
            waited = f" after {seconds:.1f} s" if seconds >= 0.1 else ""
            what = (
                f"{nbytes} bytes at {offset} are not read{waited}: earlier reads of this file have not returned, and "
                "no more are begun until one does"
            )
        super().__init__(
            errno.ETIMEDOUT, f"{what}; look at the disk (dmesg), or raise tiers.disk.read_timeout"
        )
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.seconds = seconds
        self.begun = begun

    def __str__(self) -> str:
        return str(self.strerror)


class LateRead:
    """A read that nobody waits for any more. Its memory belongs to the kernel until it is over, if it ever is."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._over = False
        self._calls: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        """Whether nothing will be written any more."""
        return self._over

    def then(self, call: Callable[[], None]) -> None:
        """Call this when it is over, in a thread of the reader's; at once if it is over already."""
        with self._lock:
            if not self._over:
                self._calls.append(call)
                return
        call()

    def finish(self) -> None:
        """The kernel has answered. For readers."""
        with self._lock:
            self._over = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class LateReads:
    """How many reads of a file are late. While `most` are, no more are begun, so that memory in their hands is bounded.

    Safe for several threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        return self._count >= self._most

    def begin(self) -> LateRead:
        """One more is late."""
        with self._lock:
            self._count += 1
        late = LateRead()
        late.then(self._end)
        return late

    def _end(self) -> None:
        with self._lock:
            self._count -= 1
