"""In which portions a layer's absent experts come when the pool is smaller than their number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ziggurat.residency.passes import IntArray
from ziggurat.residency.slots import SlotPool

Indices = npt.NDArray[np.intp]


def rounds(slots: SlotPool, absent: Indices, weights: IntArray) -> Iterator[Indices]:
    """`absent` (indices into `weights`) in portions that fit the pool one after the other.

    A round may evict anything: the rows of earlier rounds have been computed with, or their kernels are queued ahead
    of the copies. Rows that only a scan wants (weight 0) come last and take at most the colder half of a full pool,
    so that a prompt does not wipe the decode set.
    """
    wanted = absent[weights[absent] > 0]
    scanned = absent[weights[absent] == 0]
    yield from _portions(wanted, slots.slots)
    yield from _portions(scanned, max(1, slots.free, slots.slots // 2))


def _portions(groups: Indices, size: int) -> Iterator[Indices]:
    for start in range(0, len(groups), size):
        yield groups[start : start + size]
