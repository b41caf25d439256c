"""From the natural order of a matrix to lane words, through arrays that put the block's inside first.

"Block-major" is [8, rows * K/32 * 4]: axis 0 counts the eight runs of four consecutive k in a block of 32 (run =
4 h + t in the terms of layout.py), the other axis is row, block, k within the run. Reductions over a block and
operations with one number for each block then run over long contiguous stretches, and a run's four bytes are
already one lane's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_ROWS
from ziggurat.kernels.formats import U8, U32

RUNS = 8


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized rows of a matrix.

    Attributes:
        words: lane words [rows/16, 8, 4, K/32], uint32 for 2-bit and uint64 for e2m1 codes.
        scales: uint8 [rows, K/32].
        positive_zeros, negative_zeros: how many of the source's weights are exactly zero, by sign bit; left at 0
            where zeros need no care.
    """

    words: U32
    scales: U8
    positive_zeros: int = 0
    negative_zeros: int = 0


def block_major(values: U8, run_type: npt.DTypeLike) -> U8:
    """Reorder [rows, K (or K/2 pairs)] to [8, rows * K/32 * (4 weights)].

    Args:
        values: contiguous.
        run_type: a type as wide as four weights, so that they move as one.
    """
    runs = values.view(run_type).reshape(-1, RUNS)
    out = np.empty((RUNS, runs.shape[0]), runs.dtype)
    np.copyto(out, runs.T)
    return out.view(values.dtype)


def _combine(codes: U8, rows: int, grid: Grid) -> tuple[U8, ...]:
    """The bytes of lane words, for each word uint8 [4 t, rows/16, 8 g * X], of block-major codes [8, rows * X].

    Works on eight codes at once: none reaches into the next byte.
    """
    parts = codes.view(np.uint64).reshape(2, 4, rows // TILE_ROWS, 2, -1)
    low, high = parts[0, :, :, 0], parts[0, :, :, 1]
    low_16, high_16 = parts[1, :, :, 0], parts[1, :, :, 1]  # k + 16
    if grid.words == 2:
        words = []
        for first, second in ((low, high), (low_16, high_16)):
            out = second << 4
            out |= first
            words.append(out.view(np.uint8))
        return tuple(words)
    out = high << 2
    for part in (low, low_16, high_16):
        out |= part
        if part is not high_16:
            out <<= 2
    return (out.view(np.uint8),)


def lane_words(codes: U8, rows: int, grid: Grid) -> U32:
    """Lane words of block-major codes.

    Args:
        codes: uint8 [8, rows * K/32 * 4], one code each.
        rows: a multiple of 16.

    Returns:
        [rows/16, 8, 4, K/32], uint32 or, where a lane has two words, uint64; contiguous along the last axis.
    """
    words = [b.view(np.uint32).reshape(4, rows // TILE_ROWS, 8, -1) for b in _combine(codes, rows, grid)]
    return _by_tile(words)


def lane_words_from_pairs(even: U8, odd: U8, rows: int, grid: Grid) -> U32:
    """Lane words of codes kept apart by the parity of k: each block-major [8, rows * K/32 * 2]."""
    words = []
    for first, second in zip(_combine(even, rows, grid), _combine(odd, rows, grid), strict=True):
        both = second.astype(np.uint16)
        both <<= 8
        both |= first
        words.append(both.view(np.uint32).reshape(4, rows // TILE_ROWS, 8, -1))
    return _by_tile(words)


def _by_tile(words: list[U32]) -> U32:
    if len(words) == 1:
        return words[0].transpose(1, 2, 0, 3)
    both = np.empty((*words[0].shape, 2), np.uint32)
    both[..., 0], both[..., 1] = words
    return both.view(np.uint64)[..., 0].transpose(1, 2, 0, 3)
