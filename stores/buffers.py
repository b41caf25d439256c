"""Page-aligned memory for rows, as direct I/O needs it."""

from __future__ import annotations

import mmap


def aligned_buffer(nbytes: int) -> memoryview:
    """A zeroed, writable buffer that starts on a page boundary; freed when the last view of it is gone."""
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]
