"""Binding memory to a NUMA node, and asking the kernel where its pages lie.

libnuma's own calls bind a whole process or allocate by themselves (and so do its Python wrappers, which fail to import
where the library is missing); what an arena needs are the two system calls below it, for a range: mbind(2) and
move_pages(2). They are taken from libnuma where it is installed and made directly where it is not.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ziggurat.allocators.errors import NumaError, NumaPlacementError

__all__ = ["audit", "bind", "nodes_of", "sample_pages"]

_NUMBERS = {"x86_64": (237, 279), "aarch64": (235, 239)}  # mbind, move_pages
_MPOL_BIND = 2
_MASK_BITS = 1024  # MAX_NUMNODES of every kernel we know
_NOT_HERE = {-errno.ENOENT, -errno.EFAULT}  # a page that is not there, or is the shared page of zeros


def bind(address: int, nbytes: int, node: int) -> None:
    """Pages of `[address, address + nbytes)` that are not there yet will come from `node` and from nowhere else.

    NumaError if the kernel has no such node or no NUMA. `address` is on a page boundary.
    """
    if not 0 <= node < _MASK_BITS:
        raise NumaError(f"tiers.host.numa: a node is 0 to {_MASK_BITS - 1}, not {node}")
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    # The kernel reads one bit fewer than it is told.
    code = _calls()[0](
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),
        ctypes.c_uint(0),
    )
    if code:
        reason = os.strerror(ctypes.get_errno())
        raise NumaError(f"memory cannot be bound to NUMA node {node}: {reason}; set tiers.host.numa to a node that"
                        " `ziggurat doctor` lists, or to none")  # fmt: skip


def nodes_of(pages: Sequence[int]) -> list[int | None]:
    """The node of each page (addresses), None for one that is not in memory. NumaError if the kernel does not say."""
    if not pages:
        return []
    addresses = (ctypes.c_void_p * len(pages))(*pages)
    status = (ctypes.c_int * len(pages))(*[-errno.EINVAL] * len(pages))
    code = _calls()[1](
        ctypes.c_int(0), ctypes.c_ulong(len(pages)), addresses, ctypes.c_void_p(), status, ctypes.c_int(0)
    )
    if code < 0:
        raise _unknown(ctypes.get_errno())
    for one in status:
        if one < 0 and one not in _NOT_HERE:
            raise _unknown(-one)
    return [None if one < 0 else one for one in status]


def _unknown(code: int) -> NumaError:
    return NumaError(
        f"the kernel does not say where pages lie: {os.strerror(code)}; set tiers.host.numa: none"
    )


def sample_pages(address: int, nbytes: int, count: int) -> list[int]:
    """Addresses of at most `count` pages, evenly spread, the first and the last among them."""
    page = resource.getpagesize()
    pages = -(-nbytes // page)
    if pages <= count:
        return [address + page * index for index in range(pages)]
    if count < 2:
        return [address][:count]
    return [address + page * (index * (pages - 1) // (count - 1)) for index in range(count)]


def audit(
    what: str,
    address: int,
    nbytes: int,
    node: int,
    *,
    count: int = 2048,
    ask: Callable[[Sequence[int]], list[int | None]] = nodes_of,
) -> None:
    """NumaPlacementError unless every one of `count` sampled pages is in memory on `node`."""
    found = Counter(ask(sample_pages(address, nbytes, count)))
    if set(found) != {node}:
        raise NumaPlacementError(what, node, found)


@functools.cache
def _calls() -> tuple[Callable[..., int], Callable[..., int]]:
    """mbind and move_pages; both set errno."""
    try:
        library: Any = ctypes.CDLL("libnuma.so.1", use_errno=True)
        mbind, move_pages = library.mbind, library.move_pages
        mbind.restype = move_pages.restype = ctypes.c_long
        return mbind, move_pages
    except (OSError, AttributeError):
        return system_calls()


def system_calls() -> tuple[Callable[..., int], Callable[..., int]]:
    """mbind and move_pages without libnuma. NumaError on a processor whose system call numbers are not known."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise NumaError(
            f"no NUMA calls for {platform.machine()} without libnuma: install it or set tiers.host.numa: none"
        )
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    mbind, move_pages = (functools.partial(call, ctypes.c_long(number)) for number in numbers)
    return mbind, move_pages
