"""What the fast quantizers share: one number for a block, spread over the block-major weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.formats import U8

Ints = npt.NDArray[Any]


def block_max(magnitudes: Ints) -> Ints:
    """Largest of each block: block-major [8, 4 M] -> [M]."""
    by_k: Ints = np.maximum.reduce(magnitudes, axis=0)
    amax: Ints = np.maximum(np.maximum(by_k[0::4], by_k[1::4]), np.maximum(by_k[2::4], by_k[3::4]))
    return amax


def for_each_weight(blocks: Ints, repeats: int = 4) -> Ints:
    """One number for each block repeated for the weights of a run: [M] -> [repeats * M]."""
    out = np.empty((blocks.size, repeats), blocks.dtype)
    for j in range(repeats):
        out[:, j] = blocks
    return out.ravel()


def signs_in_place(negative: npt.NDArray[np.bool_], grid: Grid) -> U8:
    """The sign bits of codes, without magnitudes yet."""
    codes = negative.view(np.uint8)
    packed = codes.view(np.uint64)  # shifts eight at once; a sign never leaves its byte
    packed <<= grid.sign_bit
    return codes


def alternate_signs(codes: U8, zero: npt.NDArray[np.bool_], grid: Grid, parity: int | None = None) -> None:
    """Give exact zeros the sign of their k's parity.

    Args:
        codes, zero: block-major [8, 4 M], or [8, 2 M] where only one parity of k is there.
        parity: that parity.
    """
    sign = np.uint8(1 << grid.sign_bit)
    even = (slice(0, None, 2),) if parity is None else (slice(None),) * (parity == 0)
    odd = (slice(1, None, 2),) if parity is None else (slice(None),) * (parity == 1)
    for columns in even:
        codes[:, columns] &= ~(zero[:, columns] * sign)
    for columns in odd:
        codes[:, columns] |= zero[:, columns] * sign
