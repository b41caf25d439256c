"""What can go wrong when a folder is written to, as typed errors."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ziggurat.stores.errors import DiskFullError, PackWriteError


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged process can still write to the folder's filesystem."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextmanager
def writing(path: Path, needed: int | Callable[[], int]) -> Iterator[None]:
    """Turns an OSError of the block into DiskFullError or PackWriteError. needed: bytes still to be written."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(path, _value(needed), free_bytes(path.parent)) from e
        if e.errno == errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            raise DiskFullError(path, _value(needed), limit, "file size limit (ulimit -f)") from e
        advice = "make it writable or choose another folder (tiers.disk.path, or --to of an export)"
        raise PackWriteError(path, f"cannot be written: {os.strerror(e.errno or errno.EIO)}; {advice}") from e


def _value(needed: int | Callable[[], int]) -> int:
    return needed if isinstance(needed, int) else needed()


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents; returns what was created, innermost first. Raises PackWriteError."""
    absent = []
    at = folder
    while not at.exists() and at != at.parent:
        absent.append(at)
        at = at.parent
    with writing(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
    return absent


def remove_folders(folders: list[Path]) -> None:
    """Remove folders that are still empty, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
