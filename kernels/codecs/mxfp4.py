"""The quantizer of MXFP4 sources, e2m1 pairs (low nibble = even k) with UE8M0 scales: no arithmetic, only codes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ziggurat.kernels.codecs.exact import RISKY_SCALE_BYTE, check_range, pieces
from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.codecs.tiles import (
    Quantized,
    block_major,
    e2m1_words_from_nibbles,
    level_words_from_nibbles,
)
from ziggurat.kernels.formats import U8
from ziggurat.kernels.sources import SourceArrays

_WEIGHTS = 1 << 18


def big_levels(pairs: U8) -> U8:
    """Which magnitudes of packed e2m1 pairs become level 4: 3, 4 and 6 (codes 5, 6, 7), in bits 0 and 4."""
    big = pairs >> 1
    big |= pairs
    big &= pairs >> 2
    big &= 0x11
    return big


def mxfp4_chunks(
    source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid
) -> Iterator[tuple[int, int, Quantized]]:
    """Remapped nibbles under the checkpoint's own scale bytes; zero mode does not apply.

    Raises:
        WeightRangeError: a code would stand for a number beyond float32.
    """
    for first, last in pieces(source, start, stop, _WEIGHTS):
        pairs = block_major(source.bits[first:last], np.uint16)
        scales = source.scale_bits[first:last]
        levels = signs = pairs
        if not grid.has_zero:
            levels = big_levels(pairs)
            signs = pairs >> 3
            signs &= 0x11
        if scales.max() >= RISKY_SCALE_BYTE:
            _check_range(source, levels, scales, grid)
        rows = last - first
        words = (
            e2m1_words_from_nibbles(pairs, rows)
            if grid.has_zero
            else level_words_from_nibbles(signs, levels, rows)
        )
        yield first, last, Quantized(words, scales)


def _check_range(source: SourceArrays, levels: U8, scales: U8, grid: Grid) -> None:
    """Refuse nibbles (block-major pairs; a sign does not matter) whose value under its scale float32 cannot hold."""
    mask = 7 if grid.has_zero else 1
    by_block = np.stack([levels & mask, (levels >> 4) & mask], axis=-1).reshape(8, -1, 4).transpose(1, 0, 2)
    check_range(source, by_block.reshape(*scales.shape, TILE_K), scales, grid)
