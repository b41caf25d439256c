"""The quantizer of MXFP4 sources, e2m1 pairs (low nibble = even k) with UE8M0 scales: no arithmetic, only codes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ziggurat.kernels.codecs.exact import RISKY_SCALE_BYTE, check_range, pieces
from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.codecs.tiles import Quantized, block_major, lane_words_from_pairs
from ziggurat.kernels.formats import U8
from ziggurat.kernels.sources import SourceArrays

_WEIGHTS = 1 << 18


def mxfp4_codes(pairs: U8, grid: Grid) -> U8:
    """Codes of packed e2m1 pairs, in place of each nibble: the nibble itself, or its 2-bit level and sign.

    Magnitudes up to 2 become level 1; 3, 4 and 6 (codes 5, 6, 7) level 4; both zeros keep their sign bit.
    """
    if grid.has_zero:
        return pairs
    quarter = pairs >> 2
    big = pairs >> 1
    big |= pairs
    big &= quarter
    big &= 0x11
    quarter &= 0x22
    big |= quarter
    return big


def mxfp4_chunks(
    source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid
) -> Iterator[tuple[int, int, Quantized]]:
    """Remapped nibbles under the checkpoint's own scale bytes; zero mode does not apply.

    Raises:
        WeightRangeError: a code would stand for a number beyond float32.
    """
    for first, last in pieces(source, start, stop, _WEIGHTS):
        codes = mxfp4_codes(block_major(source.bits[first:last], np.uint16), grid)
        even, odd = codes & 15, codes >> 4
        scales = source.scale_bits[first:last]
        if scales.max() >= RISKY_SCALE_BYTE:
            by_block = np.stack([even, odd], axis=-1).reshape(8, -1, 4).transpose(1, 0, 2)
            check_range(source, by_block.reshape(*scales.shape, TILE_K), scales, grid)
        yield first, last, Quantized(lane_words_from_pairs(even, odd, last - first, grid), scales)
