"""The number formats, the quantizer's rules and the row layout once more: one weight at a time, in exact fractions.

Written from the documents, sharing nothing with the package, so that agreement with it means something. Weights are
(magnitude: Fraction, negative: bool), because a zero's sign counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache

Weight = tuple[Fraction, bool]

E2M1 = [
    Fraction(0),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(3),
    Fraction(4),
    Fraction(6),
]


@cache
def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


@cache
def small_float(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Weight:
    """Sign, exponent, mantissa with subnormals; the caller has sorted out what is not finite."""
    negative = bool(bits >> (exponent_bits + mantissa_bits))
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    fraction = Fraction(mantissa, 1 << mantissa_bits)
    if exponent == 0:
        return fraction * power(1 - bias), negative
    return (1 + fraction) * power(exponent - bias), negative


def e4m3(byte: int) -> Weight | None:
    """None is NaN."""
    return None if byte & 0x7F == 0x7F else small_float(byte, 4, 3, 7)


def e2m1(nibble: int) -> Weight:
    return small_float(nibble, 2, 1, 1)


def e8m0(byte: int) -> Fraction | None:
    return None if byte == 255 else power(byte - 127)


def bf16(bits: int) -> Weight | None:
    return None if bits & 0x7F80 == 0x7F80 else small_float(bits, 8, 7, 127)


def f16(bits: int) -> Weight | None:
    return None if bits & 0x7C00 == 0x7C00 else small_float(bits, 5, 10, 15)


def f32(bits: int) -> Weight | None:
    return None if bits & 0x7F800000 == 0x7F800000 else small_float(bits, 8, 23, 127)


def times(weight: Weight, factor: Weight) -> Weight:
    return weight[0] * factor[0], weight[1] != factor[1]


def as_float(weight: Weight) -> float:
    return -float(weight[0]) if weight[1] else float(weight[0])


# --- quantizer -------------------------------------------------------------------------------------------------------


def rule_exponent(amax: Fraction) -> int:
    if amax == 0:
        return -127
    return max(-127, min(127, round(math.log2(float(amax) / 6 + 1e-30))))


@lru_cache(maxsize=1 << 16)
def snap(scaled: Fraction) -> int:
    """Code of the nearest e2m1 magnitude; of two equally near ones the lower."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - scaled), code))


def exact_exponent(magnitudes: Sequence[Fraction], levels: Sequence[Fraction]) -> int | None:
    """The lowest exponent at which every magnitude is a level, if there is one."""
    amax = max(magnitudes)
    if amax == 0:
        return None
    top = math.frexp(float(amax))[1]
    for exponent in range(max(-127, top - 6), min(127, top + 6) + 1):
        if all(m / power(exponent) in levels for m in set(magnitudes)):
            return exponent
    return None


def fp4_block(block: Sequence[Weight]) -> tuple[list[int], int]:
    """Nibbles and scale byte."""
    magnitudes = [m for m, _ in block]
    exponent = exact_exponent(magnitudes, E2M1)
    if exponent is None:
        exponent = rule_exponent(max(magnitudes))
    return [snap(m / power(exponent)) + 8 * negative for m, negative in block], exponent + 127


def w2_block(block: Sequence[Weight], alternate: bool) -> tuple[list[int], int]:
    """Signed levels and scale byte."""
    magnitudes = [m for m, _ in block]
    exponent = exact_exponent(magnitudes, [Fraction(1), Fraction(4)])
    if exponent is None:
        exponent = rule_exponent(max(magnitudes))
    levels = []
    for k, (magnitude, negative) in enumerate(block):
        if magnitude == 0 and alternate:
            negative = k % 2 == 1
        level = 1 if E2M1[snap(magnitude / power(exponent))] <= 2 else 4
        levels.append(-level if negative else level)
    return levels, exponent + 127


def zeros_alternate(weights: Sequence[Weight]) -> bool:
    signs = [negative for magnitude, negative in weights if magnitude == 0]
    if not signs:
        return False
    return Fraction(min(sum(signs), len(signs) - sum(signs)), len(signs)) < Fraction(5, 100)


def mxfp4_level(nibble: int) -> int:
    """The 2-bit level of an e2m1 nibble."""
    magnitude, negative = e2m1(nibble)
    level = 1 if magnitude <= 2 else 4
    return -level if negative else level


# --- layout ----------------------------------------------------------------------------------------------------------


def fragment(row: int, k: int) -> tuple[int, int, int]:
    """Lane, register and byte of element (row, k) of a 16 x 32 operand A tile of m16n8k32 with 8-bit elements."""
    group, quarter = row % 8, (k % 16) // 4
    return 4 * group + quarter, (1 if row >= 8 else 0) + (2 if k >= 16 else 0), k % 4


def lane_word_offset(n: int, k: int, K: int, words: int) -> int:
    """Byte offset, in a code plane of a matrix with K columns, of the first word of the lane that holds (n, k)."""
    group = 4 // words  # k-tiles whose words make 16 bytes
    k_tile = k // 32
    lane, _, _ = fragment(n % 16, k % 32)
    tile_bytes = 32 * 4 * words
    whole_groups = K // 32 // group
    in_group = group if k_tile < whole_groups * group else K // 32 - whole_groups * group
    start_of_group = k_tile // group * group
    return (
        (n // 16) * (K // 32) * tile_bytes
        + start_of_group * tile_bytes
        + lane * in_group * 4 * words
        + (k_tile - start_of_group) * 4 * words
    )


def w2_place(n: int, k: int, K: int) -> tuple[int, list[int]]:
    """Byte offset of (n, k), and the bits of that byte that hold its code, lowest first: level 4, sign."""
    _, register, byte = fragment(n % 16, k % 32)
    return lane_word_offset(n, k, K, 1) + byte, [3 - register, 7 - register]


def fp4_place(n: int, k: int, K: int) -> tuple[int, list[int]]:
    """Byte offset of (n, k), and the bits of that byte that hold its nibble, lowest first: m, e0, e1, sign."""
    _, register, byte = fragment(n % 16, k % 32)
    bits = [1, 2, 3, 7] if register % 2 == 0 else [4, 5, 6, 0]
    return lane_word_offset(n, k, K, 2) + 4 * (register // 2) + byte, bits


def put(byte: int, bits: Sequence[int], code: int) -> int:
    """The byte with a code in some of its bits, which were zero."""
    return byte | sum(((code >> i) & 1) << bit for i, bit in enumerate(bits))


def get(byte: int, bits: Sequence[int]) -> int:
    """The code in some bits of a byte."""
    return sum(((byte >> bit) & 1) << i for i, bit in enumerate(bits))


def scale_place(n: int, k_block: int, K: int) -> int:
    """Byte offset, in a scale plane, of the scale of row n, weights 32 k_block to 32 k_block + 31."""
    blocks = K // 32
    whole = blocks // 4 * 4
    in_group = 4 if k_block < whole else blocks - whole
    start = k_block // 4 * 4
    return (n // 16) * 16 * blocks + start * 16 + (n % 16) * in_group + (k_block - start)


W2_CODES = {1: 0b00, 4: 0b01, -1: 0b10, -4: 0b11}


def write_matrix(
    codes: Sequence[Sequence[int]], scales: Sequence[Sequence[int]], codec: str
) -> tuple[bytearray, bytearray]:
    """Code plane and scale plane of one matrix; ``codes`` are 2-bit codes or nibbles [N][K]."""
    N, K = len(codes), len(codes[0])
    place, width = (w2_place, 2) if codec == "w2" else (fp4_place, 4)
    plane, scale_plane = bytearray(N * K * width // 8), bytearray(N * K // 32)
    for n in range(N):
        for k in range(K):
            offset, bits = place(n, k, K)
            plane[offset] = put(plane[offset], bits, codes[n][k])
        for block in range(K // 32):
            scale_plane[scale_place(n, block, K)] = scales[n][block]
    return plane, scale_plane


def quantize_matrix(
    weights: Sequence[Sequence[Weight]], codec: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Codes [N][K] and scale bytes [N][K/32] of a matrix that does not come from MXFP4."""
    alternate = zeros_alternate([w for row in weights for w in row])
    codes: list[list[int]] = []
    scales: list[list[int]] = []
    for row in weights:
        codes.append([])
        scales.append([])
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            if codec == "w2":
                levels, byte = w2_block(block, alternate)
                codes[-1] += [W2_CODES[level] for level in levels]
            else:
                nibbles, byte = fp4_block(block)
                codes[-1] += nibbles
            scales[-1].append(byte)
    return codes, scales
