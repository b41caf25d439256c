"""From a matrix's code and scale planes to float32 numbers."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.codecs.layout import TILE_K, TILE_ROWS, W2_SHIFTS, read_scales, read_words
from ziggurat.kernels.formats import E8M0_VALUES, F64, U8

_SCALES = E8M0_VALUES.astype(np.float32)


@cache
def _pairs(words: int) -> F64:
    """For two neighbouring codes, one in each byte of a 16-bit number: their two float32 values, moved as one float64.

    A table of pairs halves the look-ups and stays within the first-level cache.
    """
    values = (W2_GRID if words == 1 else FP4_GRID).values.astype(np.float32)
    table = np.zeros((values.size, 256, 2), np.float32)
    table[..., 1] = values[:, None]
    table[:, : values.size, 0] = values
    return table.view(np.float64)[..., 0].ravel()


def decode_matrix(codes: U8, scales: U8, rows: int, cols: int, grid: Grid) -> torch.Tensor:
    """float32 [rows, cols] of a code plane and a scale plane at any alignment."""
    tiles, k_tiles = rows // TILE_ROWS, cols // TILE_K
    lanes = read_words(codes, tiles, k_tiles, np.uint32 if grid.words == 1 else np.uint64)
    words = (
        np.ascontiguousarray(lanes.transpose(0, 1, 3, 2))
        .view(np.uint32)
        .reshape(tiles, 8, k_tiles, 4, grid.words)
    )
    factors = _SCALES[read_scales(scales, rows, k_tiles)].reshape(tiles, 2, 8, k_tiles, 1)
    # From torch, because it aligns memory to 64 bytes, and BLAS may round by alignment.
    out = torch.empty(rows, cols)
    by_register = out.numpy().reshape(tiles, 2, 8, k_tiles, 2, TILE_K // 2)
    table = _pairs(grid.words)
    mask = np.uint32((len(grid.values) - 1) * 0x01010101)
    for register in range(4):
        half, high_k = register & 1, register >> 1
        shift = W2_SHIFTS[register] if grid.words == 1 else 4 * half
        fields = (words[..., high_k if grid.words == 2 else 0] >> np.uint32(shift)) & mask
        levels = table.take(fields.view(np.uint16), mode="clip").view(np.float32)
        np.multiply(levels, factors[:, half], out=by_register[:, half, :, :, high_k])
    return out
