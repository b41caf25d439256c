"""The quantizer's rules, stated in float64 on blocks of 32 weights along K.

Scale exponent: round-half-even(log2(amax / 6 + 1e-30)), limited to [-127, 127]; an all-zero block has -127. The stored
byte is exponent + 127, so 255 never appears. Magnitudes |w| / 2^exponent go to the nearest e2m1 value, a tie to the
lower, saturating at 6. The 2-bit codec then maps magnitudes up to 2 to level 1, and 3, 4, 6 to level 4.

One rule goes before these: a block whose weights the codec can represent exactly keeps them. The rule above alone
would not: a block with largest magnitude 4 gets the exponent of [4.24, 8.49) halved, so that 4 becomes 8, saturates
to 6 and comes back as 3. With it, quantizing a dequantized row changes nothing.

Every fast path of the codecs is tested to give the same codes and bytes as these functions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.formats import E2M1_MAGNITUDES, E2M1_MIDPOINTS, F64, U8

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]

BLOCK: Final = 32
MIN_EXPONENT: Final = -127
MAX_EXPONENT: Final = 127
#: e2m1 codes from this one on (3, 4, 6) are level 4 of the 2-bit codec, those below are level 1.
BIG_CODE: Final = 5
_TINY: Final = 1e-30
_SQRT_HALF: Final = float(np.sqrt(0.5))


def rule_exponents(amax: F64) -> Ints:
    """Scale exponents by the rule, for largest magnitudes of any shape.

    x = m * 2^e with m in [1/2, 1) has log2(x) nearest to e when m > sqrt(1/2), else to e - 1. The tie is irrational,
    and no amax of a supported source (at most 30 significant bits) is near enough to it for float64 to meet it, so this
    is the rule without the rounding of a logarithm.
    """
    mantissa, exponent = np.frexp(amax / 6.0 + _TINY)
    rounded = exponent - (mantissa <= _SQRT_HALF)
    limited = np.clip(rounded, MIN_EXPONENT, MAX_EXPONENT)
    return np.where(amax == 0.0, MIN_EXPONENT, limited).astype(np.int32)


def _floor_log2(amax: F64) -> Ints:
    return (np.frexp(amax)[1] - 1).astype(np.int32)


def _magnitude_codes(scaled: F64) -> U8:
    """e2m1 codes 0..7 of |u|: counts the midpoints that lie strictly below."""
    return np.searchsorted(E2M1_MIDPOINTS, scaled, side="left").astype(np.uint8)


def _scaled(blocks: F64, exponents: Ints) -> F64:
    scaled: F64 = np.ldexp(np.abs(blocks), -exponents[..., None])
    return scaled


def fp4_exponents(blocks: F64) -> Ints:
    """Scale exponents [...] of blocks [..., 32] for e2m1 codes.

    A block that is exact at any exponent is exact at floor(log2(amax)) - 2, where its largest magnitude is 4 or 6 (or
    at -127, where that would be lower), because e2m1 holds the double of each of its values up to 3.
    """
    amax = np.abs(blocks).max(axis=-1)
    exponents = rule_exponents(amax)
    candidate = np.clip(_floor_log2(amax) - 2, MIN_EXPONENT, MAX_EXPONENT).astype(np.int32)
    (where,) = np.nonzero((amax.ravel() != 0.0) & (candidate != exponents).ravel())
    if where.size:
        scaled = _scaled(blocks.reshape(-1, BLOCK)[where], candidate.ravel()[where])
        exact = (E2M1_MAGNITUDES[_magnitude_codes(scaled)] == scaled).all(axis=-1)
        exponents.ravel()[where[exact]] = candidate.ravel()[where[exact]]
    return exponents


def w2_exponents(blocks: F64) -> Ints:
    """Scale exponents [...] of blocks [..., 32] for the levels 1 and 4.

    A block is exact when its magnitudes are one power of two, or a power of two and its quarter. The larger is
    level 4, except where that exponent would lie below -127: a block of one magnitude can then be level 1.
    """
    magnitudes = np.abs(blocks)
    amax = magnitudes.max(axis=-1)
    exponents = rule_exponents(amax)
    top = _floor_log2(amax)
    low = magnitudes.min(axis=-1)
    power = np.ldexp(1.0, top) == amax
    (where,) = np.nonzero((power & ((low == amax) | (low == amax / 4))).ravel())
    if where.size:
        block, largest = magnitudes.reshape(-1, BLOCK)[where], amax.ravel()[where, None]
        exact = ((block == largest) | (block == largest / 4)).all(axis=-1)
        where, uniform = where[exact], low.ravel()[where[exact]] == amax.ravel()[where[exact]]
        chosen = top.ravel()[where] - 2
        chosen = np.where(uniform & (chosen < MIN_EXPONENT), chosen + 2, chosen)
        fits = (chosen >= MIN_EXPONENT) & (chosen <= MAX_EXPONENT)
        exponents.ravel()[where[fits]] = chosen[fits]
    return exponents


def fp4_blocks(blocks: F64) -> tuple[U8, U8]:
    """Quantize blocks [..., 32] to e2m1.

    Returns:
        codes uint8 [..., 32] (bits 2..0 the magnitude's e2m1 code, bit 6 the sign, which zeros keep too) and scale
        bytes uint8 [...].
    """
    exponents = fp4_exponents(blocks)
    codes = _magnitude_codes(_scaled(blocks, exponents))
    return codes | (np.signbit(blocks).astype(np.uint8) << 6), (exponents + 127).astype(np.uint8)


def w2_blocks(blocks: F64, alternate_zeros: bool) -> tuple[U8, U8]:
    """Quantize blocks [..., 32] to the levels -4, -1, 1, 4.

    Args:
        blocks: float64; the first weight of a block has an even k.
        alternate_zeros: exact zeros become +1 at even and -1 at odd k; else they follow their sign bit.

    Returns:
        codes uint8 [..., 32] (bit 4 the sign, bit 0 set for level 4) and scale bytes uint8 [...].
    """
    exponents = w2_exponents(blocks)
    big = _magnitude_codes(_scaled(blocks, exponents)) >= BIG_CODE
    negative = np.signbit(blocks)
    if alternate_zeros:
        odd = (np.arange(BLOCK) & 1).astype(np.bool_)
        negative = np.where(blocks == 0.0, odd, negative)
    return (negative.astype(np.uint8) << 4) | big, (exponents + 127).astype(np.uint8)


def zeros_alternate(positive: int, negative: int) -> bool:
    """Zero mode "auto": True when the rarer sign is below 5 % of a tensor's exact zeros.

    Zeros all of one sign carry no information in it, and mapping them to one level would bias every sum over them.
    """
    return 20 * min(positive, negative) < positive + negative
