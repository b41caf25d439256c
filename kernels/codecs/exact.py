"""The plain way to quantize rows of any source: float64 numbers through the rules of quantize.py.

It serves the sources and the odd blocks that no fast path covers, and it is what the fast paths are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.codecs.tiles import Quantized, block_major, lane_words
from ziggurat.kernels.errors import WeightRangeError
from ziggurat.kernels.formats import E8M0_VALUES, U8
from ziggurat.kernels.sources import SourceArrays

#: From this scale byte on (2^126), the largest levels leave float32's range.
RISKY_SCALE_BYTE = 253
#: Float64 temporaries of this many weights stay in a core's cache.
_WEIGHTS = 1 << 14


def exact_rows(source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid) -> Quantized:
    """Quantize rows start..stop by the float64 rules.

    Raises:
        NonFiniteWeightError: NaN or infinity among the elements.
        WeightRangeError: a code would stand for a number beyond float32.
    """
    values = source.values(start, stop)
    rows, cols = values.shape
    codes, scales = grid.blocks(values.reshape(rows, cols // TILE_K, TILE_K), alternate_zeros)
    check_range(source, codes, scales, grid)
    negative = np.signbit(values[values == 0.0])
    return Quantized(
        lane_words(block_major(codes.reshape(rows, cols), np.uint32).view(np.uint8), rows, grid),
        scales,
        positive_zeros=int(negative.size - np.count_nonzero(negative)),
        negative_zeros=int(np.count_nonzero(negative)),
    )


def check_range(source: SourceArrays, codes: U8, scales: U8, grid: Grid) -> None:
    """Refuse codes [..., 32] whose value under scale bytes [...] float32 cannot hold."""
    risky = scales >= RISKY_SCALE_BYTE
    if risky.any():
        values = grid.values(codes[risky]) * E8M0_VALUES[scales[risky]][..., None]
        if (np.abs(values) >= 2.0**128).any():
            raise WeightRangeError(
                source.name,
                f"a weight becomes {np.abs(values).max():.3g}, more than float32 holds; check the tensor's scales",
            )


def exact_chunks(
    source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid
) -> Iterator[tuple[int, int, Quantized]]:
    """exact_rows over rows start..stop in pieces (first row, last row, result) that fit a cache."""
    for first, last in pieces(source, start, stop, _WEIGHTS):
        yield first, last, exact_rows(source, first, last, alternate_zeros, grid)


def pieces(source: SourceArrays, start: int, stop: int, weights: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about ``weights`` weights, each a multiple of 16 rows."""
    step = max(16, weights // source.cols // 16 * 16)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
