"""Rows of host memory that start on page boundaries: what arenas and host pools are made of."""

from __future__ import annotations

import contextlib
import errno
import mmap

import numpy as np
import torch

from ziggurat.allocators.errors import AllocationError, ClosedError, GeometryError
from ziggurat.allocators.limits import HostLimits

__all__ = ["HUGE_PAGE", "PAGE", "PageRows", "check_geometry"]

PAGE = 4096  # what direct I/O needs of an address and a length on every filesystem we know
HUGE_PAGE = 2 << 20  # of x86-64, and of 64-bit Arm with 4 KiB pages


def check_geometry(what: str, rows: int, stride: int) -> None:
    """GeometryError if `what` cannot have `rows` rows of `stride` bytes."""
    if rows < 1:
        raise GeometryError(f"{what}: at least 1 row, not {rows}")
    if stride < PAGE or stride % PAGE:
        raise GeometryError(f"{what}: a stride is a multiple of {PAGE} bytes, not {stride}")


class PageRows:
    """`rows` rows of `stride` bytes in one private anonymous mapping; every row starts on a 4 KiB boundary.

    The memory is zero at first and is given to the process page by page as it is touched. It goes back when
    `close()` was called *and* the last tensor or memoryview of it is gone: a view never dangles.
    huge: for memory that a device will read: it starts on a 2 MiB boundary and asks for 2 MiB pages, which are faster
    to touch, to lock and to map; and a forked child does not have it, since copying on write would move pages away
    from under the device. aligned: the row that starts on such a boundary. spare: bytes of address space behind the
    last row.
    Raises GeometryError for a shape that cannot be, AllocationError if the kernel refuses the memory.
    """

    def __init__(
        self, what: str, rows: int, stride: int, *, huge: bool = False, aligned: int = 0, spare: int = 0
    ) -> None:
        check_geometry(what, rows, stride)
        self._what, self.rows, self.stride = what, rows, stride
        self.seam = 0  # bytes up to where memory of another kind begins
        # The kernel hands out address space on 4 KiB boundaries; what it does not need is never touched.
        spare += HUGE_PAGE - PAGE if huge else 0
        try:
            # Private: a shared mapping would be counted as shared memory and stay in forked children.
            self._mapping: mmap.mmap | None = mmap.mmap(
                -1, self.nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EINVAL):
                raise
            have = HostLimits.read().allocatable
            raise AllocationError(what, "the kernel", self.nbytes, have, "lower its size") from error
        # numpy holds the buffer open for as long as a tensor on it lives; torch.frombuffer would not.
        array = np.frombuffer(self._mapping, dtype=np.uint8)
        self._first = -(array.ctypes.data + aligned * stride) % HUGE_PAGE if huge else 0
        if huge:
            _advise(self._mapping, mmap.MADV_HUGEPAGE)
            _advise(self._mapping, mmap.MADV_DONTFORK)
        array = array[self._first : self._first + self.nbytes].reshape(rows, stride)
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
        start = self._first + row * self.stride
        return memoryview(self._mapping)[start : start + self.stride]

    def _advise_all(self, advice: int) -> None:
        """Advice about the whole mapping, whatever it is made of by now. OSError if the kernel has no use for it."""
        if self._mapping is not None:
            self._mapping.madvise(advice)

    def close(self) -> None:
        """Lets go of the memory; closing twice does nothing."""
        self._tensor = None
        self._mapping = None


def _advise(mapping: mmap.mmap, advice: int) -> None:
    # Advice is what it says: a kernel built without huge pages refuses it, and everything works all the same.
    with contextlib.suppress(OSError):
        mapping.madvise(advice)
