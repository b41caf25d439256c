"""Fast quantizer of fp8_block sources: everything a block needs follows from its scale and its largest byte.

Magnitudes of e4m3 order like their bytes, so for a given scale s the block's largest byte decides the exponent, and
|byte| * s / 2^e > midpoint becomes byte > threshold. Exponents and thresholds are tabulated, by the float64 rules, for
each scale of a row of blocks; a weight then costs comparisons of bytes.

This needs the 32 weights of a block to share one positive scale, within limits in which the rule's 1e-30 is lost in
rounding and no exponent needs a limit. Other tensors take the float64 path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.codecs.blocks import alternate_signs, block_max, signs_in_place
from ziggurat.kernels.codecs.exact import pieces
from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.codecs.quantize import rule_exponents
from ziggurat.kernels.codecs.tiles import Quantized, block_major, lane_words
from ziggurat.kernels.formats import E4M3_VALUES, F64, U8, U32
from ziggurat.kernels.sources import SourceArrays

_WEIGHTS: Final = 1 << 18
_MAGNITUDES: Final = 127  # e4m3 bytes without sign and NaN
_LEAST_SCALE: Final = 2.0**-31
_LARGEST_SCALE: Final = 2.0**100


def is_fast_fp8(source: SourceArrays) -> bool:
    """Whether fp8_chunks is right for this fp8_block source."""
    one_scale_a_block = source.block[1] % TILE_K == 0 or source.block[1] >= source.cols
    smallest, largest = source.scales.min(), source.scales.max()
    return bool(one_scale_a_block and smallest >= _LEAST_SCALE and largest <= _LARGEST_SCALE)


def fp8_chunks(
    source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid
) -> Iterator[tuple[int, int, Quantized]]:
    """Quantize rows start..stop of an fp8_block source for which is_fast_fp8 holds, in pieces that fit a cache."""
    bn, bk = source.block
    first_band = start // bn
    scales, which = np.unique(source.scales[first_band : (stop - 1) // bn + 1], return_inverse=True)
    tables = _Tables.of(scales, grid)
    which = which.reshape(-1, source.scales.shape[1])[:, np.arange(source.cols // TILE_K) * TILE_K // bk]
    for first, last in pieces(source, start, stop, _WEIGHTS):
        scale_index = which[np.arange(first, last) // bn - first_band].ravel()
        yield first, last, _quantize(source, first, last, tables, scale_index, alternate_zeros, grid)


@dataclass(frozen=True)
class _Tables:
    """For each of S scales and each largest byte: what a block with them needs.

    Attributes:
        thresholds: uint32 [midpoints, S * 256]: the largest byte up to each midpoint of the grid, four times.
        scale_bytes: uint8 [S * 256]. Both are indexed by scale * 256 + largest byte, + 128 for a block that is kept
            exactly.
        powers: bool [S * 128]: the largest weight is a power of two, so that the block could be exact; empty where
            no scale makes any.
        exact: bool [128 * 128]: by largest byte * 128 + byte, whether a block may hold that byte and be exact.
    """

    thresholds: U32
    scale_bytes: U8
    powers: npt.NDArray[np.bool_]
    exact: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, scales: F64, grid: Grid) -> _Tables:
        largest = E4M3_VALUES[:_MAGNITUDES] * scales[:, None]
        exponents = rule_exponents(largest)
        # A block of zeros gets the thresholds of a small one: no zero is above any.
        exponents[:, 0] = exponents[:, 1]
        low = exponents[:, 1].min()
        # Thresholds depend on scale and exponent only, and there are few exponents.
        steps = np.arange(exponents.max() - low + 2)
        limits = np.ldexp(np.array(grid.midpoints)[:, None, None] / scales[:, None], low + steps)
        by_exponent = _largest_byte_up_to(limits) * np.uint32(0x01010101)
        thresholds = np.zeros((len(grid.midpoints), scales.size, 2, 128), np.uint32)
        scale_bytes = np.zeros((scales.size, 2, 128), np.uint8)
        rows = np.arange(scales.size)[:, None]
        # Only scales that are powers of two can make a block exact; its exponent is one above the rule's.
        with_exact = bool((np.frexp(scales)[0] == 0.5).any())
        for exact in range(1 + with_exact):
            thresholds[:, :, exact, :_MAGNITUDES] = by_exponent[:, rows, exponents - low + exact]
            scale_bytes[:, exact, 1:_MAGNITUDES] = exponents[:, 1:] + (exact + 127)
        powers = np.zeros((scales.size, 128) if with_exact else (0, 128), np.bool_)
        if with_exact:
            powers[:, 1:_MAGNITUDES] = np.frexp(largest[:, 1:])[0] == 0.5
        return cls(
            thresholds.reshape(len(grid.midpoints), -1),
            scale_bytes.ravel(),
            powers.ravel(),
            exact_bytes(tuple(grid.magnitudes)),
        )


def _largest_byte_up_to(limits: F64) -> U8:
    """The largest e4m3 magnitude byte whose value is at most each limit."""
    mantissa, exponent = np.frexp(limits)
    normal = ((exponent + 6) << 3) + np.floor((2 * mantissa - 1) * 8).astype(np.int64)
    subnormal = np.floor(np.minimum(limits, 1.0) * 512).astype(np.int64)
    chosen = np.where(exponent > -6, normal, subnormal)
    limited: U8 = np.minimum(chosen, _MAGNITUDES - 1).astype(np.uint8)
    return limited


@cache
def exact_bytes(magnitudes: tuple[float, ...]) -> npt.NDArray[np.bool_]:
    """Pairs (largest, other) whose ratio a grid of these magnitudes holds when the largest is its 4."""
    values = E4M3_VALUES[:128]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = 4 * values[None, :] / values[:, None]
    allowed: npt.NDArray[np.bool_] = np.isin(ratios, magnitudes).ravel()
    return allowed


def _quantize(
    source: SourceArrays,
    first: int,
    last: int,
    tables: _Tables,
    scale_index: npt.NDArray[Any],
    alternate_zeros: bool,
    grid: Grid,
) -> Quantized:
    bits = block_major(source.bits[first:last], np.uint32)
    magnitudes = bits & 0x7F
    amax = block_max(magnitudes)
    if amax.max() == 0x7F:
        source.refuse_elements(first, (source.bits[first:last] & 0x7F) == 0x7F)
    index = (scale_index << 8) + amax
    if tables.powers.size:
        _keep_exact_blocks(index, magnitudes, amax, scale_index, tables)
    codes = signs_in_place(bits.view(np.int8) < 0, grid)
    above = np.empty(codes.shape, np.bool_)
    for thresholds in tables.thresholds:
        codes += np.greater(magnitudes, thresholds.take(index, mode="clip").view(np.uint8), out=above).view(
            np.uint8
        )
    zeros = negative_zeros = 0
    if not grid.has_zero:
        zeros = magnitudes.size - int(np.count_nonzero(magnitudes))
        if zeros:
            negative_zeros = int(np.count_nonzero(bits == 0x80))
        if alternate_zeros:
            alternate_signs(codes, np.equal(magnitudes, 0, out=above), grid)
    rows = last - first
    return Quantized(
        lane_words(codes, rows, grid),
        tables.scale_bytes.take(index, mode="clip").reshape(rows, -1),
        zeros - negative_zeros,
        negative_zeros,
    )


def _keep_exact_blocks(
    index: npt.NDArray[Any], magnitudes: U8, amax: U8, scale_index: npt.NDArray[Any], tables: _Tables
) -> None:
    """Point blocks that the grid holds exactly to the entries for them."""
    (where,) = np.nonzero(tables.powers[(scale_index << 7) + amax])
    by_block = magnitudes.reshape(8, -1, 4)
    # Of unrelated weights the first four tell almost always; then the rest of the block is not looked at.
    for runs in (by_block[:1], by_block[1:]):
        pair = (amax[where].astype(np.int32) << 7)[:, None] + runs[:, where]
        where = where[tables.exact[pair].all(axis=(0, 2))]
    index[where] += 128
