"""Giving pages to a range of memory before anybody waits for them."""

from __future__ import annotations

import ctypes
import errno
import os

from ziggurat.allocators.errors import AllocationError
from ziggurat.allocators.limits import HostLimits

__all__ = ["populate"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def populate(what: str, address: int, nbytes: int) -> None:
    """Gives every page of a fresh private range (all zeros) to the process, without the interpreter lock.

    AllocationError if the kernel has no memory for it. `address` is on a page boundary.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(_MADV_POPULATE_WRITE))
        == 0
    ):
        return
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EFAULT):
        reason = f"the kernel ({os.strerror(code)})"
        raise AllocationError(what, reason, nbytes, HostLimits.read().allocatable, "lower its size")
    # An older kernel (EINVAL), or one that has another reason not to: writing has the same effect on fresh memory.
    ctypes.memset(address, 0, nbytes)
