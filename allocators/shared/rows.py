"""Rows of which some are private to this process and the others are those of a shared arena, side by side."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

from ziggurat.allocators.errors import AllocationError
from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.pages import PageRows

__all__ = ["SharedRows"]

_MAP_FIXED = 0x10


class SharedRows(PageRows):
    """`private` rows of ordinary memory, then the `rows` rows of `file`, in one piece.

    data_bytes: of the file. huge: it is of 2 MiB pages. writable: whether the rows of the file can be written to here;
    otherwise their views are read-only, and who writes to the tensor there ends the process.
    AllocationError if the kernel refuses.
    """

    def __init__(
        self,
        private: int,
        rows: int,
        stride: int,
        file: int,
        data_bytes: int,
        *,
        huge: bool,
        writable: bool,
    ) -> None:
        super().__init__(
            "shared arena",
            private + rows,
            stride,
            huge=True,
            aligned=private,
            spare=data_bytes - rows * stride,
        )
        self._private, self.seam = private, private * stride
        self._writable = writable
        address = self.tensor.data_ptr() + private * stride
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        # Over part of the private mapping, with which it ends: no view of it dangles either.
        got = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(data_bytes),
            ctypes.c_int(access),
            ctypes.c_int(mmap.MAP_SHARED | _MAP_FIXED),
            ctypes.c_int(file),
            ctypes.c_int64(0),
        )
        if got != address:
            code = ctypes.get_errno()
            self.close()
            reason = f"the kernel ({errno.errorcode.get(code, code)}: {os.strerror(code)})"
            raise AllocationError(
                "shared arena",
                reason,
                data_bytes,
                HostLimits.read().allocatable,
                "set tiers.host.share: null",
            )
        with contextlib.suppress(OSError):  # a forked child has no use for it, and would keep it alive
            self._advise_all(mmap.MADV_DONTFORK)

    def view(self, row: int) -> memoryview:
        found = super().view(row)
        return found if self._writable or row < self._private else found.toreadonly()
