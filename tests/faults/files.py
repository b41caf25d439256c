"""Makes this process's own file calls fail: the counterpart of `FaultyReader` for what writes.

It stands between Python and the kernel in the functions of `os` that change files. The n-th call, counted over all
threads, is the one that fails; which n, and everything random about it, comes from a seed.

delay      nothing but time
short      a write takes fewer bytes than it was given, as it may
flip       one bit of what is written is turned over
error      the call fails with EIO, before it did anything
torn       a write stores a part, then fails with EIO
full       the same with ENOSPC
kill       the process is killed with SIGKILL before the call
torn-kill  a write stores a part, then the process is killed
power      the process is killed, and of what was written since the last sync of its file random pages are gone
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

Kind = Literal["delay", "short", "flip", "error", "torn", "full", "kill", "torn-kill", "power", "none"]
WATCHED = ("pwrite", "fdatasync", "fsync", "ftruncate", "rename", "unlink")
PAGE = 4096


@dataclass
class FaultyFiles:
    """Patches `os` in this process for good; meant for a child that does one thing and ends. calls: seen so far."""

    kind: Kind
    at: int
    seed: int
    calls: int = 0
    hit: str = ""
    _unsynced: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    _real: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def install(self) -> FaultyFiles:
        for name in WATCHED:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name))
        return self

    def remove(self) -> None:
        """Undo `install`."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls += 1
                now = self.calls == self.at
                if self.kind == "power":
                    return self._with_power(name, now, real, args, kwargs)
            if not now:
                return real(*args, **kwargs)
            self.hit = name
            return self._fail(name, real, args, kwargs)

        return call

    def _fail(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        dice = random.Random(self.seed)
        writes = name == "pwrite"
        if self.kind == "delay":
            time.sleep(0.01)
        elif self.kind == "kill" or (self.kind == "torn-kill" and not writes):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "error" or (self.kind == "torn" and not writes):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif self.kind == "full" and not writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif writes:
            fd, data, offset = args
            if self.kind == "flip":
                changed = bytearray(data)
                bit = dice.randrange(8 * len(changed))
                changed[bit // 8] ^= 1 << bit % 8
                return real(fd, changed, offset)
            part = dice.randrange(1, len(data)) if len(data) > 1 else 0
            written = real(fd, data[:part], offset) if part else 0
            if self.kind == "short" and part:
                return written
            if self.kind == "torn-kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind in ("torn", "full"):
                number = errno.EIO if self.kind == "torn" else errno.ENOSPC
                raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    def _with_power(self, name: str, now: bool, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note what the file held before each write, until it is synced; at the cut, put some of that back."""
        if now:
            self._cut()
        if name == "pwrite":
            fd, data, offset = args
            self._unsynced.setdefault(fd, []).append((offset, _held(fd, len(data), offset)))
        elif name in ("fdatasync", "fsync"):
            self._unsynced.pop(args[0], None)
        return real(*args, **kwargs)

    def _cut(self) -> None:
        dice = random.Random(self.seed)
        for fd, writes in self._unsynced.items():
            for offset, before in reversed(writes):
                for at in range(0, len(before), PAGE):
                    if dice.random() < 0.5:
                        self._real["pwrite"](fd, before[at : at + PAGE], offset + at)
        os.kill(os.getpid(), signal.SIGKILL)


def _held(fd: int, nbytes: int, offset: int) -> bytes:
    """What a file holds now, also where `fd` is for writing only."""
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(reading, nbytes, offset)
    finally:
        os.close(reading)


def run_in_child(job: Callable[[], None]) -> int:
    """Run `job` in a fork of this process, which must have no threads; its exit status, negative for a signal.

    An exception of the job is status 1 and is not shown: the job's caller expects one.
    """
    pid = os.fork()
    if pid == 0:
        try:
            job()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # the child ends here, whatever it was
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    """Files of a folder, without locks: one stays behind when its holder is killed, and locks nothing."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".lock"}
