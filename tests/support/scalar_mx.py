"""Block-scaled matrix instructions and MXFP8 once more: one number at a time, in exact fractions.

Written from the documents; shares nothing with the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from support.scalar_codec import as_float, e4m3, power, small_float

NAN_BITS = 0x7FFFFFFF


def e5m2(byte: int) -> tuple[Fraction, bool] | float:
    """A finite weight, or infinity or NaN as a float."""
    if byte & 0x7C == 0x7C:
        return math.nan if byte & 3 else (-math.inf if byte & 0x80 else math.inf)
    return small_float(byte, 5, 2, 15)


def mma_sum(a: Sequence[int], b: Sequence[int], scale_a: int, scale_b: int, c: int) -> int:
    """float32 bits of c + sum of E5M2 a[k] times E4M3 b[k] under two scales, as the model has it; c as bits, finite."""
    if scale_a == 255 or scale_b == 255:
        return NAN_BITS
    scale = power(scale_a - 127) * power(scale_b - 127)
    terms: list[tuple[Fraction, int]] = []  # signed value, exponent before normalization
    infinities = set()
    for x, y in zip(a, b, strict=True):
        first, second = e5m2(x), e4m3(y)
        if second is None or (isinstance(first, float) and (math.isnan(first) or second[0] == 0)):
            return NAN_BITS
        if isinstance(first, float):
            infinities.add((first < 0) != second[1])
            continue
        sign = -1 if first[1] != second[1] else 1
        exponent = max((x >> 2) & 31, 1) - 15 + max((y >> 3) & 15, 1) - 7
        terms.append((sign * first[0] * second[0] * scale, exponent + scale_a + scale_b - 254))
    if infinities:
        return NAN_BITS if len(infinities) == 2 else 0x7F800000 | (0x80000000 if True in infinities else 0)
    value, negative = small_float(c, 8, 23, 127)
    terms.append((-value if negative else value, max((c >> 23) & 255, 1) - 127))
    largest = max((exponent for number, exponent in terms if number), default=0)
    unit = power(largest - 25)
    total = sum((math.trunc(number / unit) for number, _ in terms), 0) * unit
    return f32_toward_zero(total)


def f32_toward_zero(value: Fraction) -> int:
    """float32 bits of an exact number, cut off."""
    if value == 0:
        return 0
    sign, size = (0x80000000 if value < 0 else 0), abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < power(exponent)
    if exponent > 127:
        return sign | 0x7F800000
    if exponent < -126:
        return sign | math.trunc(size / power(-149))
    return sign | (exponent + 127) << 23 | (math.trunc(size / power(exponent - 23)) - (1 << 23))


def e4m3_nearest(value: float) -> int:
    """Code of the nearest E4M3 number, ties to the even code, saturating; the sign of zero stays."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    if abs(value) >= 448:
        return sign | 0x7E
    exact = Fraction(abs(value))

    def distance(code: int) -> tuple[Fraction, int]:
        weight = e4m3(code)
        assert weight is not None
        return abs(weight[0] - exact), code & 1

    return sign | min(range(0x7F), key=distance)


def mxfp8_block(block: Sequence[float]) -> tuple[list[int], int]:
    """E4M3 codes and scale byte of 32 finite numbers."""
    largest = max(abs(v) for v in block)
    exponent = -127 if largest == 0 else max(-127, math.frexp(largest)[1] - 1 - 8)
    return [e4m3_nearest(v * 2.0**-exponent) for v in block], exponent + 127


def dequantized(codes: Sequence[int], byte: int) -> list[float]:
    weights = [e4m3(code) for code in codes]
    return [as_float(w) * 2.0 ** (byte - 127) if w is not None else math.nan for w in weights]
