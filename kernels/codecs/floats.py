"""Fast quantizer of bf16, f16 and f32 sources: the float64 rules in integer arithmetic on the bit patterns.

Magnitudes of IEEE floats order like their bit patterns, and multiplying by 2^e adds e to the exponent field. So with
m mantissa bits and the largest pattern A of a block

* amax / 6 is nearer to the next power of two when amax's fraction exceeds 6 / 2^2.5 - 1 = 0.0606…, which makes the
  scale byte ((A - c) >> m) - 2, c being the first fraction above;
* |w| / 2^e > midpoint becomes pattern > (byte << m) + (pattern of the midpoint - pattern of 1);
* a block is exact when each A - pattern is one of a few multiples of half a binade.

These hold while amax is at least 2^-40, where the rule's 1e-30 is lost in rounding, exponents need no limit and all
thresholds are normal numbers. Rows with another nonzero block take the float64 path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.codecs.blocks import Ints, alternate_signs, block_max, for_each_weight, signs_in_place
from ziggurat.kernels.codecs.exact import exact_rows, pieces
from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.codecs.tiles import Quantized, block_major, lane_words
from ziggurat.kernels.formats import U8, float32_bits
from ziggurat.kernels.sources import SourceArrays


@dataclass(frozen=True)
class _Layout:
    """A binary float format with 8 exponent bits.

    Attributes:
        integer: signed type of the same width.
        run_type: a type as wide as four of them.
        mantissa: explicit mantissa bits.
        weights: weights of a piece: its temporaries stay in the caches, and the work outweighs the calls.
    """

    integer: npt.DTypeLike
    run_type: npt.DTypeLike
    mantissa: int
    weights: int

    def pattern(self, value: float) -> int:
        """Bits of a positive value that the format holds exactly."""
        return int(np.float32(value).view(np.uint32)) >> (23 - self.mantissa)

    @property
    def first_fraction_up(self) -> int:
        """Smallest mantissa field whose fraction exceeds 6 / 2^2.5 - 1; that bound is irrational."""
        return int((6 / 2**2.5 - 1) * (1 << self.mantissa)) + 1


_BF16: Final = _Layout(np.int16, np.uint64, 7, 1 << 18)
_F32: Final = _Layout(np.int32, np.complex128, 23, 1 << 17)
_LEAST_AMAX: Final = 2.0**-40


def float_chunks(
    source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid
) -> Iterator[tuple[int, int, Quantized]]:
    """Quantize rows start..stop of a bf16, f16 or f32 source in pieces that fit a cache."""
    layout = _BF16 if source.format == "bf16" else _F32
    for first, last in pieces(source, start, stop, layout.weights):
        bits = source.bits[first:last]
        if source.format == "f16":
            bits = float32_bits(bits)
        part = _quantize(bits.view(layout.integer), layout, alternate_zeros, grid)
        yield first, last, part or exact_rows(source, first, last, alternate_zeros, grid)


def _quantize(bits: Ints, layout: _Layout, alternate_zeros: bool, grid: Grid) -> Quantized | None:
    """Quantize [rows, K] patterns; None where the float64 path must decide (or refuse)."""
    rows, cols = bits.shape
    signed = block_major(bits, layout.run_type)
    magnitudes = signed & np.iinfo(layout.integer).max
    amax = block_max(magnitudes)
    zero_blocks = amax == 0
    if amax.max() >= layout.pattern(float("inf")) or (amax < layout.pattern(_LEAST_AMAX))[~zero_blocks].any():
        return None
    scale_bytes = ((amax - layout.first_fraction_up) >> layout.mantissa) - 2
    scale_bytes[zero_blocks] = 127  # any byte with thresholds above zero, until the codes are made
    _keep_exact_blocks(scale_bytes, magnitudes, amax, layout, grid)
    codes = _codes(signed, magnitudes, scale_bytes << layout.mantissa, layout, grid)
    scale_bytes[zero_blocks] = 0
    zeros = negative_zeros = 0
    if not grid.has_zero:
        zeros = magnitudes.size - int(np.count_nonzero(magnitudes))
    if zeros:
        negative_zeros = int(np.count_nonzero(signed == np.iinfo(layout.integer).min))
        if alternate_zeros:
            alternate_signs(codes, magnitudes == 0, grid)
    return Quantized(
        lane_words(codes, rows, grid),
        scale_bytes.astype(np.uint8).reshape(rows, cols // TILE_K),
        zeros - negative_zeros,
        negative_zeros,
    )


def _keep_exact_blocks(scale_bytes: Ints, magnitudes: Ints, amax: Ints, layout: _Layout, grid: Grid) -> None:
    """Raise the scale byte of blocks that the grid holds exactly; their amax is a power of two."""
    (where,) = np.nonzero((amax & ((1 << layout.mantissa) - 1)) == 0)
    by_block = magnitudes.reshape(8, -1, 4)
    half_binade = layout.mantissa - 1
    allowed = np.zeros(8, np.bool_)
    allowed[list(grid.exact_steps)] = True
    # Of unrelated weights the first four tell almost always; then the rest of the block is not looked at.
    for runs in (by_block[:1], by_block[1:]):
        if not where.size:
            return
        chosen = runs[:, where]
        below = amax[where, None] - chosen
        fits = allowed[np.minimum(below >> half_binade, 7)]
        fits &= (below & ((1 << half_binade) - 1)) == 0
        if grid.has_zero:
            fits |= chosen == 0
        where = where[fits.all(axis=(0, 2))]
    scale_bytes[where] += 1


def _codes(signed: Ints, magnitudes: Ints, scales: Ints, layout: _Layout, grid: Grid) -> U8:
    """Codes uint8 [8, blocks * 4] from patterns of the scales [blocks]."""
    codes = signs_in_place(np.less(signed, 0), grid)
    offsets = [layout.pattern(midpoint) - layout.pattern(1.0) for midpoint in grid.midpoints]
    scales = for_each_weight(scales)
    above = np.empty(codes.shape, np.bool_)
    if len(offsets) == 1:
        codes |= np.greater(magnitudes, scales + offsets[0], out=above).view(np.uint8)
        return codes
    # Midpoints are quarters of a binade apart, so that their distances fit a byte, where comparing is cheaper.
    quarter = layout.mantissa - 2
    scales += 1
    steps = np.maximum(magnitudes, scales - (16 << quarter))  # below them all
    steps -= scales
    steps >>= quarter
    steps = steps.astype(np.int8)
    for offset in offsets:
        codes += np.greater_equal(steps, offset >> quarter, out=above).view(np.uint8)
    return codes
