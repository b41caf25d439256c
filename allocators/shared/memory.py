"""Memory without a name that several processes map: files of memfd_create(2), of one size for good."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ziggurat.allocators import numa
from ziggurat.allocators.populate import populate
from ziggurat.allocators.shared.errors import ProtocolError

__all__ = [
    "HUGE_PAGE",
    "check_file",
    "file_bytes",
    "free_huge_bytes",
    "make_file",
    "read_only",
    "renew",
    "touch",
]

HUGE_PAGE = 2 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_CHUNK = 128 << 20
_THREADS = 16


def free_huge_bytes(node: int | None, *, sysfs: Path = Path("/sys")) -> int:
    """Bytes of reserved 2 MiB pages that nobody has taken or was promised, of one NUMA node if it is named.

    The memory that is available does not count them.
    """
    where = sysfs / ("kernel/mm" if node is None else f"devices/system/node/node{node}")

    def read(name: str) -> int:
        try:
            return int((where / "hugepages" / "hugepages-2048kB" / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    # What was promised is not counted by node.
    promised = read("resv_hugepages") if node is None else 0
    return max(0, read("free_hugepages") - promised) * HUGE_PAGE


def file_bytes(nbytes: int, huge: bool) -> int:
    """`nbytes` in whole pages."""
    page = HUGE_PAGE if huge else mmap.PAGESIZE
    return -(-nbytes // page) * page


def make_file(name: str, nbytes: int, *, huge: bool = False) -> int:
    """A file of `nbytes` zeros that nobody can shrink or grow; its descriptor. OSError if the kernel has none.

    huge: of reserved 2 MiB pages (vm.nr_hugepages), `nbytes` in whole ones.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge else 0)
    file = os.memfd_create(name, flags)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        if huge:
            mmap.mmap(file, nbytes).close()  # reserves the pages, or says that they are not there
        return file
    except BaseException:
        os.close(file)
        raise


def check_file(file: int, nbytes: int) -> None:
    """ProtocolError unless the file has `nbytes` and keeps them: touching what was cut off would be the end."""
    try:
        seals, size = fcntl.fcntl(file, fcntl.F_GET_SEALS), os.fstat(file).st_size
    except OSError as error:
        raise ProtocolError(f"what came is no sealed memory: {error.strerror}") from error
    if size != nbytes or seals & fcntl.F_SEAL_SHRINK == 0:
        raise ProtocolError(f"what came is a file of {size} bytes with seals {seals}, not {nbytes} for good")


def read_only(file: int) -> int:
    """Another descriptor of the file, through which nothing can be written."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)


def touch(what: str, file: int, nbytes: int, node: int | None, progress: Callable[[int], None]) -> None:
    """Give every page of the file memory, from one NUMA node if it is named, and charge it to this process.

    progress: called with the bytes that are ready. AllocationError without memory; NumaError and NumaPlacementError
    for the node.
    """
    with mmap.mmap(file, nbytes) as memory:
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(start)
        try:
            with contextlib.suppress(
                OSError
            ):  # larger pages are faster to touch, lock and map, where they are allowed
                memory.madvise(mmap.MADV_HUGEPAGE)
            if node is not None:
                numa.bind(address, nbytes, node)  # the file's policy from now on, in whatever process
            ready = 0
            with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as threads:
                pieces = [(at, min(_CHUNK, nbytes - at)) for at in range(0, nbytes, _CHUNK)]
                futures = {threads.submit(populate, what, address + at, size): size for at, size in pieces}
                for future in as_completed(futures):
                    future.result()
                    ready += futures[future]
                    progress(ready)
            if node is not None:
                numa.audit(what, address, nbytes, node)
        finally:
            del start  # a mapping that is pointed into cannot be closed


def renew(file: int, start: int, nbytes: int) -> bool:
    """Have other pages in a range of the file, of zeros; False if that cannot be done or is not certain.

    A device may still be writing to the old pages, on behalf of a process that is gone. They leave the file, and what
    arrives in them is seen by nobody. Whoever has them pinned does not see the new ones either.
    """
    if _fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes):
        return False
    try:
        if os.lseek(file, start, os.SEEK_DATA) < start + nbytes:
            return False  # the range shares a huge page with others, and was only set to zero
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is no data from here to the end of the file
            return False
    return _fallocate(file, 0, start, nbytes) == 0


def _fallocate(file: int, mode: int, start: int, nbytes: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    return int(call(ctypes.c_int(file), ctypes.c_int(mode), ctypes.c_int64(start), ctypes.c_int64(nbytes)))
