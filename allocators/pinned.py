"""An arena of locked memory on one NUMA node, which devices read at the speed of the link."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from ziggurat.allocators import numa
from ziggurat.allocators.errors import PageLockError
from ziggurat.allocators.lockers import CudaLocker, LockRefusedError, PageLocker
from ziggurat.allocators.pages import PageRows, check_geometry
from ziggurat.allocators.populate import populate
from ziggurat.allocators.row_places import RowPlaces

__all__ = ["PinnedArena", "Progress"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes that are ready and those of the whole arena, in the thread that makes the arena."""

_WHAT = "host arena"
_CHUNK = (
    128 << 20
)  # small enough to show progress and to keep every thread busy, far above the cost of one call
_THREADS = 16


class PinnedArena(RowPlaces):
    """A HostArena whose pages are bound to a NUMA node, all in memory, locked, and mapped for devices.

    Made in one go, which takes a while for many GiB: bind the range to `node` before any page exists; then several
    threads take chunks of whole rows, give them pages and lock them, so that one chunk is locked while others are
    touched; then ask the kernel on which node sampled pages lie. Whatever fails on the way undoes all of it.

    node: the NUMA node, None binds nothing and asks nothing. locker: how pages are locked, None registers them with
    CUDA (device 0's context). progress: see `Progress`. chunk_bytes: locked at a time, at least one row.
    threads: at most so many; None for as many as this process has CPUs, up to 16. memory: rows that are there already,
    with content perhaps; they are locked, and neither bound nor touched.

    `close()` unlocks at once: whoever copies out of the arena on a device waits for that first.
    Raises GeometryError for a shape that cannot be, AllocationError if there is no memory, NumaError and
    NumaPlacementError for the node, PageLockError if pages cannot be locked.
    """

    kind = "pinned"

    def __init__(
        self,
        places: int,
        stride: int,
        *,
        node: int | None = None,
        locker: PageLocker | None = None,
        progress: Progress | None = None,
        chunk_bytes: int = _CHUNK,
        threads: int | None = None,
        memory: PageRows | None = None,
    ) -> None:
        check_geometry(_WHAT, places, stride)
        locker = CudaLocker() if locker is None else locker
        super().__init__(PageRows(_WHAT, places, stride, huge=True) if memory is None else memory)
        self._fresh = memory is None
        self.device_pointer: int | None = None
        self._locked: list[tuple[int, int]] = []
        # Memory that is unmapped while it is registered would stay locked; at exit the driver cleans up by itself.
        self._unlock = weakref.finalize(self, _unlock, locker, self._locked)
        self._unlock.atexit = False
        address = self._rows.tensor.data_ptr()
        try:
            if node is not None and self._fresh:
                numa.bind(address, self.nbytes, node)
            chunk = max(1, chunk_bytes // stride) * stride
            # A driver may lock one kind of memory at a time only.
            ranges = [
                (start, min(chunk, end - start))
                for begin, end in ((0, self._rows.seam), (self._rows.seam, self.nbytes))
                for start in range(begin, end, chunk)
            ]
            views = self._prepare(address, ranges, locker, progress, threads or _threads(len(ranges)))
            self.device_pointer = _device_pointer(views)
            if self.device_pointer is None and any(view is not None for _, view in views):
                self.device_pointer = self._lock_whole(address, locker)
            if node is not None and self._fresh:
                numa.audit(_WHAT, address, self.nbytes, node)
        except BaseException:
            self.close()
            raise

    def _prepare(
        self,
        address: int,
        ranges: Sequence[tuple[int, int]],
        locker: PageLocker,
        progress: Progress | None,
        threads: int,
    ) -> list[tuple[int, int | None]]:
        """Touches and locks every range; the offset of each and its address for devices, in order."""
        stop, guard = threading.Event(), threading.Lock()

        def prepare(start: int, count: int) -> tuple[int, int, int | None]:
            try:
                if self._fresh and not stop.is_set():
                    populate(_WHAT, address + start, count)
                if stop.is_set():
                    return start, 0, None  # another chunk has failed; its error is the one that counts
                view = locker.lock(address + start, count)
            except LockRefusedError as error:
                stop.set()
                done = sum(size for _, size in self._locked)
                raise PageLockError(_WHAT, count, done, error.reason, error.advice) from error
            except BaseException:
                stop.set()
                raise
            with guard:
                self._locked.append((address + start, count))
            return start, count, view

        views: list[tuple[int, int | None]] = []
        ready = 0
        with ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-arena") as pool:
            futures: list[Future[tuple[int, int, int | None]]] = []
            try:
                futures += [pool.submit(prepare, *one) for one in ranges]
                for future in as_completed(futures):
                    start, count, view = future.result()
                    views.append((start, view))
                    ready += count
                    if progress is not None:
                        progress(ready, self.nbytes)
            except BaseException:
                stop.set()
                for future in futures:
                    future.cancel()
                raise
        return sorted(views, key=lambda one: one[0])

    def _lock_whole(self, address: int, locker: PageLocker) -> int | None:
        """One range for all: kernels need the arena in one piece, which chunks did not give."""
        logger.info("chunks of the arena are not side by side for the device; locking it as one range")
        _unlock(locker, self._locked)
        try:
            pointer = locker.lock(address, self.nbytes)
        except LockRefusedError as error:
            raise PageLockError(_WHAT, self.nbytes, 0, error.reason, error.advice) from error
        self._locked.append((address, self.nbytes))
        return pointer

    def close(self) -> None:
        self._unlock()
        self.device_pointer = None
        super().close()


def _device_pointer(views: Sequence[tuple[int, int | None]]) -> int | None:
    """The device's address of the first range if all others follow it as they do on the host."""
    first = views[0][1]
    if first is None or any(view != first + start for start, view in views):
        return None
    return first


def _unlock(locker: PageLocker, locked: list[tuple[int, int]]) -> None:
    while locked:
        address, count = locked.pop()
        try:
            locker.unlock(address, count)
        except Exception:  # the others still have to be unlocked, and nobody could do better
            logger.warning("%d bytes of an arena could not be unlocked", count, exc_info=True)


def _threads(ranges: int) -> int:
    return max(1, min(_THREADS, len(os.sched_getaffinity(0)), ranges))
