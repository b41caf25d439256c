"""Memory for rows and for what is read of a checkpoint: page-aligned, as direct I/O needs it; in large pages if long.

The kernel pins each page of a direct read or write and hands it to the device as a piece of its own. In pages of 2 MiB
that took an eighth of the processor time here, and a virtual disk, to which so many pieces go at a time, was twice as
fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

LARGE_PAGE = 2 << 20


def aligned_buffer(nbytes: int) -> memoryview:
    """A zeroed, writable buffer that starts on a page boundary; freed when the last view of it is gone.

    From 2 MiB on it starts on a multiple of that, and every whole 2 MiB of it are a large page where the kernel has
    one.
    It takes no more memory for that. A process that is forked gets its own copy.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = nbytes // LARGE_PAGE * LARGE_PAGE
    if not whole:
        return memoryview(mmap.mmap(-1, nbytes, flags=private))[:nbytes]
    mapped = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=private)  # what is never touched takes no memory
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % LARGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return memoryview(mapped)[begin : begin + nbytes]
