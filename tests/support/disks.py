"""Real filesystems that are small, and disks that fill up."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FILLER = "filler"


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path | None]:
    """A filesystem of its own at `place`, which is made; None where nobody may mount."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_disk(folder: Path) -> None:
    """Write a file until the filesystem of `folder` has no block left."""
    with (folder / _FILLER).open("ab", buffering=0) as file:
        for size in (1 << 20, 65536, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise


def free_disk(folder: Path) -> None:
    """Give back what `fill_disk` took."""
    (folder / _FILLER).unlink()


def punch(path: Path, offset: int, length: int) -> None:
    """Take the blocks of a piece of a file away: it reads as zeros, and writing it needs blocks again."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDWR)
    try:
        numbers = (ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), ctypes.c_int64(offset), ctypes.c_int64(length))
        if libc.fallocate(fd, *numbers):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
