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
from ziggurat.kernels.codecs.layout import TILE_K, TILE_ROWS
from ziggurat.kernels.formats import U8, U32

RUNS = 8


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized rows of a matrix.

    Attributes:
        words: lane words, one or two arrays uint32 [rows/16, 8, 4, K/32].
        scales: uint8 [rows, K/32].
        positive_zeros, negative_zeros: how many of the source's weights are exactly zero, by sign bit; left at 0
            where zeros need no care.
    """

    words: tuple[U32, ...]
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


def lane_bytes(codes: U8, rows: int, grid: Grid) -> tuple[U8, ...]:
    """Combine block-major codes into the bytes of lane words.

    Args:
        codes: uint8 [8, rows * X], one code each, X any number of bytes for each row.
        rows: a multiple of 16.

    Returns:
        for each word uint8 [4 t, rows/16, 8 g, X].
    """
    parts = codes.reshape(2, 4, rows // TILE_ROWS, 2, 8, -1)
    low, high = parts[0, :, :, 0], parts[0, :, :, 1]
    low_16, high_16 = parts[1, :, :, 0], parts[1, :, :, 1]  # k + 16
    if grid.words == 2:
        return tuple(first | (second << 4) for first, second in ((low, high), (low_16, high_16)))
    out = high << 2
    out |= low
    out <<= 2
    out |= low_16
    out <<= 2
    out |= high_16
    return (out,)


def lane_words(codes: U8, rows: int, grid: Grid) -> tuple[U32, ...]:
    """Lane words [rows/16, 8, 4, K/32] of block-major codes [8, rows * K/32 * 4]."""
    return tuple(b.view(np.uint32).transpose(1, 2, 0, 3) for b in lane_bytes(codes, rows, grid))


def lane_words_from_pairs(even: U8, odd: U8, rows: int, grid: Grid) -> tuple[U32, ...]:
    """Lane words of codes kept apart by the parity of k: each block-major [8, rows * K/32 * 2]."""
    words = []
    for first, second in zip(lane_bytes(even, rows, grid), lane_bytes(odd, rows, grid), strict=True):
        both = np.empty((*first.shape, 2), np.uint8)
        both[..., 0], both[..., 1] = first, second
        words.append(both.reshape(*first.shape[:3], -1).view(np.uint32).transpose(1, 2, 0, 3))
    return tuple(words)


def codes_from_words(words: tuple[U32, ...], grid: Grid) -> U8:
    """The inverse: codes uint8 [N, K] from lane words [N/16, 8, 4, K/32]."""
    tiles, _, _, k_tiles = words[0].shape
    codes = np.empty((tiles, 2, 8, k_tiles, 2, 4, 4), np.uint8)
    by_row = codes.transpose(0, 1, 2, 4, 5, 3, 6)  # tile, half, g, h, t, k_tile, j
    for i, word in enumerate(words):
        lanes = np.ascontiguousarray(word).view(np.uint8).reshape(tiles, 8, 4, k_tiles, 4)
        if grid.words == 2:
            by_row[:, 0, :, i], by_row[:, 1, :, i] = lanes & 15, lanes >> 4
        else:
            by_row[:, 0, :, 0], by_row[:, 1, :, 0] = (lanes >> 4) & 3, lanes >> 6
            by_row[:, 0, :, 1], by_row[:, 1, :, 1] = (lanes >> 2) & 3, lanes & 3
    return codes.reshape(tiles * TILE_ROWS, k_tiles * TILE_K)
