"""One file opened for reading: through the page cache, and past it where the filesystem allows that."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import DirectMode, ReadJob

# Direct I/O needs offset, length and address aligned to the device's block size; 4 KiB suits every common one.
DIRECT_ALIGNMENT = 4096

# f_type of filesystems over block devices and in memory. Others (FUSE, those of networks) may wait for the other side
# while a read is being begun, although they were told not to wait.
_LOCAL = {
    0xEF53,  # ext2 to ext4
    0x58465342,  # XFS
    0x9123683E,  # btrfs
    0xF2F52010,  # F2FS
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
}


class ReadableFile:
    """Descriptors of one file. `buffered` always works; `direct` is None where direct I/O is refused or not wanted.

    mode: "auto" uses direct I/O for every job that is aligned for it, if the filesystem takes it, and buffered reads
    otherwise; "always" refuses both to fall back and to run a misaligned job; "never" reads buffered.
    local: whether beginning a read is known not to wait for it.
    Raises ReaderError if the file cannot be opened this way.
    """

    def __init__(self, path: Path, mode: DirectMode) -> None:
        if mode not in ("auto", "always", "never"):
            raise ReaderError(f"direct is {mode!r}; it can be auto, always or never")
        self.path = path
        self.always = mode == "always"
        try:
            self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise ReaderError(f"{path}: cannot be opened: {e.strerror}") from e
        self.direct = None if mode == "never" else self._open_direct()
        if self.always and self.direct is None:
            os.close(self.buffered)
            raise ReaderError(
                f"{path}: its filesystem does not take direct I/O; set tiers.disk.direct to auto or never"
            )
        self.local = _filesystem(self.buffered) in _LOCAL
        self._closed = False

    def check(self, job: ReadJob) -> None:
        """Raises ValueError for a job that cannot be run."""
        if job.offset < 0:
            raise ValueError(f"job {job.tag}: offset {job.offset} is negative")
        if job.buffer.readonly or not job.buffer.c_contiguous or not job.buffer.nbytes:
            raise ValueError(f"job {job.tag}: the buffer is read-only, not contiguous or empty")
        if self.always and not is_aligned(job.offset, job.buffer.nbytes, address_of(job.buffer)):
            raise ValueError(
                f"job {job.tag}: direct I/O needs offset, size and address to be multiples of {DIRECT_ALIGNMENT}"
            )

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Have the kernel start reading (offset, length) pieces into the page cache; False where reads go past it."""
        if self.direct is not None:
            return False
        for offset, length in pieces:
            os.posix_fadvise(self.buffered, offset, length, os.POSIX_FADV_WILLNEED)
        return True

    def forget(self, offset: int, length: int) -> None:
        """Drop a piece's clean pages from the page cache, so that the next read of it comes from the disk."""
        os.posix_fadvise(self.buffered, offset, length, os.POSIX_FADV_DONTNEED)

    def release(self, offset: int, length: int) -> None:
        """`forget` where reads go through the page cache; nothing otherwise, and nothing once it is closed."""
        if self.direct is None and not self._closed:
            self.forget(offset, length)

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.buffered)
            if self.direct is not None:
                os.close(self.direct)

    def _open_direct(self) -> int | None:
        """A descriptor for direct I/O, or None if the filesystem refuses it at open or at the first read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None
        try:
            os.preadv(fd, [aligned_buffer(DIRECT_ALIGNMENT)], 0)
        except OSError:
            os.close(fd)
            return None
        return fd


def _filesystem(fd: int) -> int:
    """Which kind of filesystem a file is on, by the kernel's number; 0 if it does not say."""
    found = (ctypes.c_long * 64)()  # struct statfs, larger than it is anywhere; the kind comes first
    return int(found[0]) & 0xFFFFFFFF if ctypes.CDLL(None).fstatfs(fd, found) == 0 else 0


def is_aligned(offset: int, nbytes: int, address: int) -> bool:
    """Whether direct I/O takes such a read."""
    return not (offset | nbytes | address) % DIRECT_ALIGNMENT


def address_of(buffer: memoryview) -> int:
    """Where a writable, contiguous, non-empty buffer starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
