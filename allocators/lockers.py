"""Locking pages in memory: by registering them with CUDA, which also maps them for devices, or by mlock(2)."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Protocol

from ziggurat.allocators.cuda_driver import CudaDriver, cuda_driver
from ziggurat.allocators.errors import CudaError

__all__ = ["CudaLocker", "LockRefusedError", "MlockLocker", "PageLocker"]


class LockRefusedError(Exception):
    """A range that a locker could not lock; an arena turns it into a PageLockError. `advice` says what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


class PageLocker(Protocol):
    """Locks ranges of whole pages. Different ranges may be locked from different threads at once."""

    def lock(self, address: int, nbytes: int) -> int | None:
        """Locks a range; its address for devices, None if they cannot read it. LockRefusedError if it is not locked."""

    def unlock(self, address: int, nbytes: int) -> None:
        """Undoes one `lock` of exactly this range."""


class CudaLocker:
    """Registers ranges with CUDA: page-locked for every context (portable) and mapped for devices.

    device: the CUDA device whose context is used in threads that have none. The kernel driver takes references on the
    pages (get_user_pages) and counts nothing against RLIMIT_MEMLOCK; see `memlock_trial` for the proof on a machine.
    """

    def __init__(self, device: int = 0, *, driver: CudaDriver | None = None) -> None:
        self._device = device
        self._driver = cuda_driver() if driver is None else driver

    def lock(self, address: int, nbytes: int) -> int | None:
        driver = self._driver
        try:
            driver.use(self._device)
            driver.register(address, nbytes)
        except CudaError as error:
            raise LockRefusedError(
                str(error), "lower tiers.host.size, or set tiers.host.on_limit: pageable"
            ) from error
        try:
            return driver.device_pointer(address)
        except CudaError as error:
            driver.unregister(address)
            raise LockRefusedError(
                f"locked, but not mapped for the device: {error}", "set tiers.host.on_limit: pageable"
            ) from error

    def unlock(self, address: int, nbytes: int) -> None:
        self._driver.use(self._device)
        self._driver.unregister(address)


class MlockLocker:
    """Locks ranges with mlock(2): no page is swapped out, no device can read them, RLIMIT_MEMLOCK counts."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def lock(self, address: int, nbytes: int) -> int | None:
        if self._libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            reason = os.strerror(ctypes.get_errno())
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            known = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
            raise LockRefusedError(
                f"{reason} (locked-memory limit: {known})", "raise it (ulimit -l) or lower tiers.host.size"
            )
        return None

    def unlock(self, address: int, nbytes: int) -> None:
        self._libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
