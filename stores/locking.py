"""One builder per pack: an advisory lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ziggurat.stores.errors import PackLockedError
from ziggurat.stores.writing import writing


@contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock file at `path` for the block; the file is removed afterwards.

    A file left behind by a killed process is no obstacle. Raises PackLockedError with the holder's process id, or
    PackWriteError if the folder cannot be written.
    """
    fd = _acquire(path)
    try:
        with writing(path, 32):
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while the lock is held, so that it is surely ours
        os.close(fd)


def _acquire(path: Path) -> int:
    while True:
        with writing(path, 32):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            text = os.pread(fd, 32, 0).strip()
            os.close(fd)
            raise PackLockedError(path, int(text) if text.isdigit() else None) from e
        except BaseException:
            os.close(fd)
            raise
        if _is_at(path, fd):
            return fd
        os.close(fd)  # its holder removed it just before we got the lock; others would lock a new file


def _is_at(path: Path, fd: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))
