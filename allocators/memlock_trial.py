"""Whether memory that is registered with CUDA counts against the locked-memory limit, found out by trying.

NVIDIA's open kernel driver for Linux takes references on the pages (get_user_pages, kernel-open/nvidia/os-mlock.c of
release 580) and counts them nowhere, so RLIMIT_MEMLOCK, often 8 MiB, does not bind a pinned arena there. Another
driver, or a sandbox that answers in its place, may count. One trial tells: a process that may lock 64 KiB registers
1 MiB. It is a process of its own, since a CUDA context must not be in one that forks workers later.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import resource
import subprocess
import sys

from ziggurat.allocators.cuda_driver import cuda_driver
from ziggurat.allocators.errors import CudaError

__all__ = ["registration_counts"]

_LIMIT, _TRIED = 64 << 10, 1 << 20
_CAP_IPC_LOCK = 14  # linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_COUNTS, _FREE, _UNKNOWN = 0, 10, 20  # exit codes; others are of a process that broke
_SECONDS = 60


@functools.cache
def registration_counts() -> bool | None:
    """True if registered memory counts against the limit, False if it does not, None if that could not be tried."""
    command = [sys.executable, "-m", "ziggurat.allocators.memlock_trial", "--try"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return {_COUNTS: True, _FREE: False}.get(done.returncode) if done.stdout.strip() == b"tried" else None


def _give_up_exemption() -> None:
    """Takes CAP_IPC_LOCK from this process, which would make the limit void."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (
        ctypes.c_uint32 * 6
    )()  # effective, permitted, inheritable of the first 32 capabilities, then of the others
    if libc.capget(header, sets) == 0:
        sets[0] &= ~(1 << _CAP_IPC_LOCK) & 0xFFFFFFFF
        libc.capset(header, sets)


def _try() -> int:
    try:
        driver = cuda_driver()
        driver.use(0)
    except CudaError:
        return _UNKNOWN
    memory = mmap.mmap(-1, _TRIED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _give_up_exemption()
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    limit = _LIMIT if hard == resource.RLIM_INFINITY else min(_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(_TRIED)) == 0:
        return _UNKNOWN  # the limit does not even bind mlock here: the trial would say nothing
    try:
        driver.register(address, _TRIED)
    except CudaError:
        return _COUNTS
    driver.unregister(address)
    return _FREE


if __name__ == "__main__" and sys.argv[1:] == ["--try"]:
    result = _try()
    print("tried")
    sys.exit(result)
