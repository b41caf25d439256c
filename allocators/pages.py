"""Rows of host memory that start on page boundaries: what arenas and host pools are made of."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import torch

from ziggurat.allocators.errors import AllocationError, ClosedError, GeometryError
from ziggurat.allocators.limits import HostLimits

__all__ = ["PAGE", "PageRows"]

PAGE = 4096  # what direct I/O needs of an address and a length on every filesystem we know


class PageRows:
    """`rows` rows of `stride` bytes in one private anonymous mapping; every row starts on a 4 KiB boundary.

    The memory is zero at first and is given to the process page by page as it is touched. It goes back when
    `close()` was called *and* the last tensor or memoryview of it is gone: a view never dangles.
    Raises GeometryError for a shape that cannot be, AllocationError if the kernel refuses the memory.
    """

    def __init__(self, what: str, rows: int, stride: int) -> None:
        if rows < 1:
            raise GeometryError(f"{what}: at least 1 row, not {rows}")
        if stride < PAGE or stride % PAGE:
            raise GeometryError(f"{what}: a stride is a multiple of {PAGE} bytes, not {stride}")
        self._what, self.rows, self.stride = what, rows, stride
        try:
            # Private: a shared mapping would be counted as shared memory and stay in forked children.
            self._mapping: mmap.mmap | None = mmap.mmap(
                -1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EINVAL):
                raise
            have = HostLimits.read().allocatable
            raise AllocationError(what, "the kernel", self.nbytes, have, "lower its size") from error
        # numpy holds the buffer open for as long as a tensor on it lives; torch.frombuffer would not.
        array = np.frombuffer(self._mapping, dtype=np.uint8).reshape(rows, stride)
        self._tensor: torch.Tensor | None = torch.from_numpy(array)

    @property
    def nbytes(self) -> int:
        return self.rows * self.stride

    @property
    def tensor(self) -> torch.Tensor:
        """All rows: u8 `[rows, stride]`."""
        if self._tensor is None:
            raise ClosedError(f"{self._what} is closed")
        return self._tensor

    def view(self, row: int) -> memoryview:
        """The writable bytes of row `row` (checked by the caller)."""
        if self._mapping is None:
            raise ClosedError(f"{self._what} is closed")
        return memoryview(self._mapping)[row * self.stride : (row + 1) * self.stride]

    def close(self) -> None:
        """Lets go of the memory; closing twice does nothing."""
        self._tensor = None
        self._mapping = None
