"""How a batch of rows gets from host memory to a device: one call for all, or one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ziggurat.allocators.cuda_driver import CudaDriver, cuda_driver

__all__ = [
    "FEW_ROWS",
    "GATHER_BELOW",
    "BatchedCopies",
    "FewOrMany",
    "RowMover",
    "ShiftedSource",
    "SingleCopies",
]

# Rows of fewer bytes travel faster by a kernel that loads them over the link, others by the copy engine in one batch.
# `crossover.gather_below_bytes` in bench/results/h200/transfers.json (bench/transfers.py) is the measurement.
GATHER_BELOW = 1 << 20
# Up to so many large rows arrive sooner by a call each than by one for all, whose own preparation takes longer; the
# same file has both for 1 to 64 rows.
FEW_ROWS = 16


class RowMover(Protocol):
    """Moves ranges of page-locked host memory to device memory."""

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        """Enqueues on `stream` a copy of `nbytes[i]` bytes from address `src[i]` to `dst[i]`, for every i.

        The targets do not overlap. The copies are done in no particular order, some time after this returned.
        """


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

    Neighbouring rows stay copies of their own: a copy that goes from one registration of host memory to the next is
    refused by the driver, and an arena is registered in chunks.

    overlap: prefer an engine that leaves multiprocessors to kernels. Where a step waits for its rows none run
    meanwhile, and the hint alone makes a batch start later.
    """

    def __init__(self, driver: CudaDriver | None = None, *, overlap: bool = False) -> None:
        self._driver = cuda_driver() if driver is None else driver
        self._overlap = overlap

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        if not len(dst):
            return
        to, start, size = (np.array(one, dtype=np.uint64) for one in (dst, src, nbytes))
        order = np.argsort(to)
        self._driver.copy_batch(to[order], start[order], size[order], stream, overlap=self._overlap)


class FewOrMany:
    """`few` for batches of up to FEW_ROWS rows, `many` for larger ones."""

    def __init__(self, few: RowMover, many: RowMover) -> None:
        self._few, self._many = few, many

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        mover = self._few if len(dst) <= FEW_ROWS else self._many
        mover.move(dst, src, nbytes, stream)


class ShiftedSource:
    """For a mover that reads rows as the device does: the arena's addresses there, `shift` above the host's."""

    def __init__(self, mover: RowMover, shift: int) -> None:
        self._mover, self._shift = mover, shift

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        self._mover.move(dst, [one + self._shift for one in src], nbytes, stream)
