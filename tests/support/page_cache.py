"""What the kernel holds of a file, asked page by page."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE


def resident(path: Path, offset: int, length: int) -> int:
    """Pages of a piece (whole pages) that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
        view = np.frombuffer(whole, dtype=np.uint8)
        found = (ctypes.c_ubyte * (length // PAGE))()
        address = ctypes.c_void_p(view.ctypes.data + offset)
        failed = libc.mincore(address, ctypes.c_size_t(length), found)
        del view, address
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(one & 1 for one in found)


def drop(path: Path) -> bool:
    """Write a file out and have it leave the page cache; False on a filesystem that is nothing but page cache."""
    size = path.stat().st_size // PAGE * PAGE
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(path, 0, size) == 0
