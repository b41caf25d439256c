"""From a matrix's code and scale planes to float32 numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.codecs.layout import TILE_K, TILE_ROWS, read_scales, read_words
from ziggurat.kernels.formats import E8M0_VALUES, F64, U8

_SCALES = E8M0_VALUES.astype(np.float32)


@dataclass(frozen=True)
class _Field:
    """Where a register's codes lie in the bytes of a word.

    Attributes:
        word: which of a lane's words.
        mask: the byte's bits that are this register's, on their places.
        pairs: for two neighbouring bytes under that mask, one 16-bit number: their two float32 values, moved as one
            float64. A table of pairs halves the look-ups; few of its entries are ever touched, so those stay in the
            first-level cache.
    """

    word: int
    mask: np.uint32
    pairs: F64

    @classmethod
    def of(cls, word: int, values: dict[int, float]) -> _Field:
        """Args: values: by the byte under the mask."""
        bytes_ = np.array(list(values), np.intp)
        numbers = np.array(list(values.values()), np.float32)
        table = np.zeros((bytes_.max() + 1, 256, 2), np.float32)
        table[bytes_[:, None], bytes_, 0] = numbers
        table[bytes_[:, None], bytes_, 1] = numbers[:, None]
        mask = int(np.bitwise_or.reduce(bytes_))
        return cls(word, np.uint32(mask * 0x01010101), table.view(np.float64)[..., 0].ravel())


@cache
def _fields(words: int) -> tuple[_Field, ...]:
    """Of registers 0 to 3."""
    fields = []
    for register in range(4):
        values: dict[int, float] = {}
        for negative in (0, 1):
            for code, magnitude in enumerate((W2_GRID if words == 1 else FP4_GRID).magnitudes.tolist()):
                if words == 1:
                    byte = (negative << 7 | code << 3) >> register
                else:
                    byte = code << 4 | negative if register & 1 else negative << 7 | code << 1
                values[byte] = -magnitude if negative else magnitude
        fields.append(_Field.of(register >> 1 if words == 2 else 0, values))
    return tuple(fields)


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
    for register, field in enumerate(_fields(grid.words)):
        half, high_k = register & 1, register >> 1
        bytes_ = words[..., field.word] & field.mask
        levels = field.pairs.take(bytes_.view(np.uint16), mode="clip").view(np.float32)
        np.multiply(levels, factors[:, half], out=by_register[:, half, :, :, high_k])
    return out
