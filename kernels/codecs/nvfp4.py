"""Fast quantizer of ModelOpt NVFP4 sources: e2m1 pairs under an e4m3 scale for 16 weights and one float32 for all.

A block of 32 has two halves. A half's largest e2m1 code and its scale byte decide its largest magnitude, and with it
the exponent the half would want; the rule's exponent never falls as amax grows, so the block's is the larger of the
two. In a half, |w| / 2^e > midpoint becomes code > threshold, where the threshold depends on scale byte and exponent.
Both are tabulated by the float64 rules for all 127 scale bytes.

This needs scales that are not negative, and magnitudes within limits in which the rule's 1e-30 is lost in rounding and
no exponent needs a limit. Other tensors take the float64 path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.codecs.blocks import alternate_signs, for_each_weight
from ziggurat.kernels.codecs.exact import pieces
from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.codecs.quantize import rule_exponents
from ziggurat.kernels.codecs.tiles import Quantized, block_major, lane_words_from_pairs
from ziggurat.kernels.formats import E2M1_MAGNITUDES, E4M3_VALUES, F64, U8, U16
from ziggurat.kernels.sources import SourceArrays

Ints = npt.NDArray[Any]
_WEIGHTS: Final = 1 << 18
_SCALES: Final = 127  # e4m3 bytes without sign and NaN
_EXPONENTS: Final = 32
_LEAST_SCALE: Final = 2.0**-30
_LARGEST_SCALE: Final = 2.0**100


def is_fast_nvfp4(source: SourceArrays) -> bool:
    """Whether nvfp4_chunks is right for this nvfp4 source."""
    return _LEAST_SCALE <= source.global_scale <= _LARGEST_SCALE and bool((source.scale_bits < 0x80).all())


def nvfp4_chunks(
    source: SourceArrays, start: int, stop: int, alternate_zeros: bool, grid: Grid
) -> Iterator[tuple[int, int, Quantized]]:
    """Quantize rows start..stop of an nvfp4 source for which is_fast_nvfp4 holds, in pieces that fit a cache."""
    tables = half_tables(source.global_scale, grid.words)
    for first, last in pieces(source, start, stop, _WEIGHTS):
        yield first, last, _quantize(source, first, last, tables, alternate_zeros, grid)


@lru_cache(maxsize=16)
def half_tables(global_scale: float, words: int) -> HalfTables:
    """All tasks of a tensor want the same ones."""
    return HalfTables.of(global_scale, W2_GRID if words == 1 else FP4_GRID)


@dataclass(frozen=True)
class HalfTables:
    """What a half and a block need, for one global scale.

    Exponents are counted from ``base``, the smallest that a magnitude above zero can want; one lower is an all-zero
    block.

    Attributes:
        exponents: uint8 [127 * 8]: by scale byte * 8 + largest code, the exponent that half wants, counted.
        powers: bool [127 * 8]: its largest magnitude is a power of two, so that the block could be exact.
        thresholds: uint16 [midpoints, 127 * 32]: by scale byte * 32 + counted exponent, the largest code up to each
            midpoint of the grid, twice.
        scale_bytes: uint8 [32]: by counted exponent.
        base: see above.
    """

    exponents: U8
    powers: npt.NDArray[np.bool_]
    thresholds: U16
    scale_bytes: U8
    base: int

    @classmethod
    def of(cls, global_scale: float, grid: Grid) -> HalfTables:
        halves = E4M3_VALUES[:_SCALES, None] * E2M1_MAGNITUDES * global_scale
        wanted = rule_exponents(halves)
        base = int(wanted[halves != 0].min())
        counted = np.where(halves == 0, 0, wanted - base + 1)
        steps = np.arange(_EXPONENTS) - 1 + base
        limits = np.ldexp(np.array(grid.midpoints)[:, None], steps)
        codes_below = (halves[:, None] <= limits[:, None, :, None]).sum(axis=-1)
        thresholds = ((codes_below - 1) * 0x0101).astype(np.uint16)
        scale_bytes = (steps + 127).astype(np.uint8)
        scale_bytes[0] = 0
        return cls(
            counted.astype(np.uint8).ravel(),
            (np.frexp(halves)[0] == 0.5).ravel(),
            thresholds.reshape(len(grid.midpoints), -1),
            scale_bytes,
            base,
        )


def _quantize(
    source: SourceArrays, first: int, last: int, tables: HalfTables, alternate_zeros: bool, grid: Grid
) -> Quantized:
    rows = last - first
    pairs = block_major(source.bits[first:last], np.uint16)
    scales = np.ascontiguousarray(source.scale_bits[first:last].reshape(-1, 2).T).astype(np.intp)
    nibbles = (pairs & 15, pairs >> 4)  # of even and odd k
    half_index = (scales << 3) + _half_max(*nibbles)
    exponents = tables.exponents.take(half_index, mode="clip").max(axis=0)
    if tables.powers.any():
        _keep_exact_blocks(exponents, half_index, source, first, last, tables, grid)
    places = (scales << 5) + exponents
    thresholds = [table.take(places, mode="clip").view(np.uint8) for table in tables.thresholds]  # [2, 2 M]
    no_scale = (scales == 0) if not grid.has_zero and not scales.all() else None
    codes = []
    zeros = negative_zeros = 0
    above = np.empty((4, pairs.shape[1]), np.bool_)
    for parity, nibble in enumerate(nibbles):
        magnitudes = nibble & 7
        code = nibble & 8
        packed = code.view(np.uint64)  # shifts eight at once; a sign never leaves its byte
        packed <<= grid.sign_bit - 3
        if not grid.has_zero:
            zero = magnitudes == 0
            if no_scale is not None:
                for half in (0, 1):
                    zero[4 * half : 4 * half + 4] |= for_each_weight(no_scale[half], 2)
            zeros += int(np.count_nonzero(zero))
            signs = (zero.view(np.uint64) << grid.sign_bit) & packed
            negative_zeros += int(np.count_nonzero(signs.view(np.uint8)))
        for half in (0, 1):
            runs = slice(4 * half, 4 * half + 4)
            for threshold in thresholds:
                code[runs] += np.greater(magnitudes[runs], threshold[half], out=above).view(np.uint8)
        if alternate_zeros and not grid.has_zero:
            alternate_signs(code, zero, grid, parity)
        codes.append(code)
    return Quantized(
        lane_words_from_pairs(codes[0], codes[1], rows, grid),
        tables.scale_bytes.take(exponents, mode="clip").reshape(rows, -1),
        zeros - negative_zeros,
        negative_zeros,
    )


def _half_max(even: U8, odd: U8) -> U8:
    """Largest magnitude code of each half: uint8 [2, M] of block-major [8, 2 M]."""
    by_k = np.maximum(even & 7, odd & 7).reshape(2, 4, -1).max(axis=1)
    largest: U8 = np.maximum(by_k[:, 0::2], by_k[:, 1::2])
    return largest


def _keep_exact_blocks(
    exponents: U8,
    half_index: Ints,
    source: SourceArrays,
    first: int,
    last: int,
    tables: HalfTables,
    grid: Grid,
) -> None:
    """Give blocks whose largest weight may be a power of two the exponents of the rules.

    Only a global scale that is itself a power of two makes any.
    """
    (where,) = np.nonzero(tables.powers[half_index].any(axis=0))
    values: F64 = source.values(first, last).reshape(-1, TILE_K)
    exact = grid.exponents(values[where])
    exponents[where] = np.where(exponents[where] == 0, 0, exact - tables.base + 1)
