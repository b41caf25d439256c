"""How a batch of rows gets from host memory to a device: one call for all, or one call each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ziggurat.allocators.cuda_driver import CudaDriver, cuda_driver
from ziggurat.allocators.errors import CudaError

__all__ = ["BatchedCopies", "RowMover", "SingleCopies", "merge"]

logger = logging.getLogger(__name__)
_INVALID_VALUE = 1


class RowMover(Protocol):
    """Moves ranges of page-locked host memory to device memory."""

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        """Enqueues on `stream` a copy of `nbytes[i]` bytes from address `src[i]` to `dst[i]`, for every i.

        The targets do not overlap. The copies are done in no particular order, some time after this returned.
        """


def merge(
    dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same copies as uint64 arrays by target address; those that are side by side at both ends are one."""
    to, start, size = (np.array(one, dtype=np.uint64) for one in (dst, src, nbytes))
    if len(to) > 1:
        order = np.argsort(to)
        to, start, size = to[order], start[order], size[order]
        joins = (to[:-1] + size[:-1] == to[1:]) & (start[:-1] + size[:-1] == start[1:])
        if joins.any():
            heads = np.flatnonzero(np.concatenate(([True], ~joins)))
            to, start, size = to[heads], start[heads], np.add.reduceat(size, heads)
    return to, start, size


class SingleCopies:
    """One asynchronous copy a row, in the order given: what a loop over rows does, and right for any host memory.

    From memory that is not page-locked the driver copies through a buffer of its own and returns when it has read it.
    """

    def __init__(self, driver: CudaDriver | None = None) -> None:
        self._driver = cuda_driver() if driver is None else driver

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        for to, start, size in zip(dst, src, nbytes, strict=True):
            self._driver.copy(to, start, size, stream)


class BatchedCopies:
    """One call of the driver for all rows. Not on the legacy default stream.

    overlap: prefer copy engines to multiprocessors, since kernels run meanwhile.
    """

    def __init__(self, driver: CudaDriver | None = None, *, overlap: bool = True) -> None:
        self._driver = cuda_driver() if driver is None else driver
        self._overlap = overlap
        self._merge = True

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        if not len(dst):
            return
        if self._merge:
            arrays = merge(dst, src, nbytes)
            try:
                self._driver.copy_batch(*arrays, stream, overlap=self._overlap)
                return
            except CudaError as error:
                if error.code != _INVALID_VALUE or len(arrays[0]) == len(dst):
                    raise
                # A merged range may cross from one registration to the next, which a driver is free to refuse.
                logger.warning(
                    "the driver takes no merged rows (%s); rows are copied one by one from here on", error
                )
                self._merge = False
        to, start, size = (np.array(one, dtype=np.uint64) for one in (dst, src, nbytes))
        self._driver.copy_batch(to, start, size, stream, overlap=self._overlap)
