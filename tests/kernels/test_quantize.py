"""The float64 rules against exact fractions, and the properties they promise."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import scalar_codec as scalar
from support.weights import awkward_values
from ziggurat.kernels.codecs import quantize
from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.formats import E8M0_VALUES, U8

F64 = npt.NDArray[np.float64]
EXPONENTS = st.one_of(
    st.integers(-10, 10), st.integers(-150, 120), st.sampled_from([-133, -129, -128, -127, -126, -125])
)


def bf16_value(bits: int) -> float:
    value = scalar.bf16(bits)
    return 0.0 if value is None else scalar.as_float(value)


@st.composite
def blocks(draw: st.DrawFn) -> F64:
    """Blocks of 32 with ties, saturation, zeros of both signs, powers of two, exact blocks, extremes."""
    exponent = draw(EXPONENTS)
    grid = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    element = draw(
        st.sampled_from(
            [
                st.integers(0, 36).map(lambda n: n / 4),
                grid,
                st.sampled_from([1.0, 4.0]),
                st.just(1.0),
                st.sampled_from([0.0, 1.0, 4.0]),
                st.integers(0, 7).map(lambda n: 2.0**-n),
                st.just(0.0),
                st.floats(0, 8, width=32),
                st.one_of(grid, st.floats(0, 8, width=16)),
            ]
        )
    )
    magnitudes = draw(st.lists(element, min_size=32, max_size=32))
    signs = draw(st.integers(0, 2**32 - 1))
    scaled = np.ldexp(np.array(magnitudes), exponent)
    return np.where(np.array([(signs >> i) & 1 for i in range(32)], bool), -scaled, scaled)


def exactly(block: F64) -> list[scalar.Weight]:
    return [(Fraction(abs(v)), bool(np.signbit(v))) for v in block.tolist()]


def dequantized(codes: U8, bytes_: U8, grid: Grid) -> F64:
    result: F64 = grid.values(codes) * E8M0_VALUES[bytes_][..., None]
    return result


def fp4_blocks(blocks: F64) -> tuple[U8, U8]:
    """With nibbles for codes, whose sign is next to the magnitude."""
    codes, bytes_ = quantize.fp4_blocks(blocks)
    assert not (codes & 0xB8).any()
    return codes >> 3 | codes & 7, bytes_


def w2_blocks(blocks: F64, alternate: bool) -> tuple[U8, U8]:
    """With two-bit codes."""
    codes, bytes_ = quantize.w2_blocks(blocks, alternate)
    assert not (codes & 0xEE).any()
    return codes >> 3 | codes & 1, bytes_


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_fp4_block_is_the_scalar_one(block: F64) -> None:
    nibbles, byte = fp4_blocks(block[None])
    assert (nibbles[0].tolist(), int(byte[0])) == scalar.fp4_block(exactly(block))


@settings(max_examples=300, deadline=None)
@given(blocks(), st.booleans())
def test_w2_block_is_the_scalar_one(block: F64, alternate: bool) -> None:
    codes, byte = w2_blocks(block[None], alternate)
    levels, expected = scalar.w2_block(exactly(block), alternate)
    assert (codes[0].tolist(), int(byte[0])) == ([scalar.W2_CODES[level] for level in levels], expected)


def test_every_bf16_alone_in_its_block() -> None:
    """All finite patterns as the only weight of a block; zeros around it take their own signs."""
    bits = [b for b in range(65536) if b & 0x7F80 != 0x7F80]
    values = np.zeros((len(bits), 32))
    values[:, 0] = [bf16_value(b) for b in bits]
    nibbles, bytes_ = fp4_blocks(values)
    codes, w2_bytes = w2_blocks(values, False)
    assert not nibbles[:, 1:].any()
    for i, pattern in enumerate(bits):
        if pattern & 0x8000:  # the same magnitudes again
            assert nibbles[i, 0] == nibbles[i - len(bits) // 2, 0] | 8
            assert codes[i, 0] == codes[i - len(bits) // 2, 0] | 2
            assert (bytes_[i], w2_bytes[i]) == (bytes_[i - len(bits) // 2], w2_bytes[i - len(bits) // 2])
            continue
        weight = scalar.bf16(pattern)
        assert weight is not None
        block = [weight, (Fraction(0), False)]  # one zero speaks for 31
        expected, byte = scalar.fp4_block(block)
        assert (nibbles[i, 0], bytes_[i]) == (expected[0], byte)
        levels, byte = scalar.w2_block(block, False)
        assert (codes[i, 0], w2_bytes[i]) == (scalar.W2_CODES[levels[0]], byte)


def test_every_bf16_under_scale_one() -> None:
    """All patterns up to 6 beside a 6, which fixes the scale at 1."""
    bits = [b for b in range(65536) if abs(bf16_value(b)) <= 6 and b & 0x7F80 != 0x7F80]
    values = np.full((len(bits), 32), 6.0)
    values[:, 1] = [bf16_value(b) for b in bits]
    nibbles, bytes_ = fp4_blocks(values)
    codes, w2_bytes = w2_blocks(values, False)
    assert (bytes_ == 127).all()
    assert (w2_bytes == 127).all()
    for i, pattern in enumerate(bits):
        weight = scalar.bf16(pattern)
        assert weight is not None
        code = scalar.snap(weight[0])
        assert nibbles[i, 1] == code + 8 * weight[1]
        assert codes[i, 1] == (2 if weight[1] else 0) + (scalar.E2M1[code] > 2)


@settings(max_examples=200, deadline=None)
@given(blocks())
def test_fp4_is_idempotent(block: F64) -> None:
    once = dequantized(*quantize.fp4_blocks(block[None]), FP4_GRID)
    again = dequantized(*quantize.fp4_blocks(once), FP4_GRID)
    assert once.tobytes() == again.tobytes()


@settings(max_examples=200, deadline=None)
@given(blocks(), st.booleans())
def test_w2_is_idempotent(block: F64, alternate: bool) -> None:
    once = dequantized(*quantize.w2_blocks(block[None], alternate), W2_GRID)
    again = dequantized(*quantize.w2_blocks(once, alternate), W2_GRID)
    assert once.tobytes() == again.tobytes()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=32, max_size=32), st.integers(0, 252))
def test_an_mxfp4_block_keeps_its_values(nibbles: list[int], byte: int) -> None:
    """Upcast and packed to fp4 again, at every scale down to 2^-127."""
    values = np.array([scalar.as_float(scalar.e2m1(n)) for n in nibbles]) * 2.0 ** (byte - 127)
    back = dequantized(*quantize.fp4_blocks(values[None]), FP4_GRID)[0]
    assert back.tobytes() == values.tobytes()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([1, 4, -1, -4]), min_size=32, max_size=32), st.integers(0, 252))
def test_a_w2_block_keeps_its_values(levels: list[int], byte: int) -> None:
    values = np.array(levels) * 2.0 ** (byte - 127)
    back = dequantized(*quantize.w2_blocks(values[None], False), W2_GRID)[0]
    assert back.tobytes() == values.tobytes()


@settings(max_examples=100, deadline=None)
@given(blocks())
def test_w2_negates_with_its_input(block: F64) -> None:
    block = np.where(block == 0.0, 1.0, block)
    plus = dequantized(*quantize.w2_blocks(block[None], False), W2_GRID)
    minus = dequantized(*quantize.w2_blocks(-block[None], False), W2_GRID)
    assert (plus == -minus).all()


def test_w2_has_no_sign_bias_on_symmetric_input() -> None:
    half = awkward_values(np.random.default_rng(5), 8, 256, ("normal", "grid", "powers", "w2 exact"))
    values = np.concatenate([half, -half]).reshape(-1, 32)
    for alternate in (False, True):
        # Zeros that alternate balance among themselves, not with those of another block.
        given = np.where(values == 0.0, 1.0, values) if alternate else values
        given[given.shape[0] // 2 :] = -given[: given.shape[0] // 2]
        assert dequantized(*quantize.w2_blocks(given, alternate), W2_GRID).sum() == 0.0


@pytest.mark.parametrize(
    ("positive", "negative", "alternate"),
    [
        (0, 0, False),
        (1, 0, True),
        (0, 7, True),
        (19, 1, False),
        (20, 1, True),
        (1, 20, True),
        (95, 5, False),
        (96, 4, True),
    ],
)
def test_zero_mode_alternates_below_five_percent(positive: int, negative: int, alternate: bool) -> None:
    assert quantize.zeros_alternate(positive, negative) is alternate
    zeros = [(Fraction(0), False)] * positive + [(Fraction(0), True)] * negative
    assert scalar.zeros_alternate(zeros) is alternate


def test_alternating_zeros_balance() -> None:
    codes, byte = quantize.w2_blocks(np.zeros((4, 32)), True)
    assert (byte == 0).all()
    assert dequantized(codes, byte, W2_GRID).sum() == 0.0
    assert codes[0, :4].tolist() == [0, 16, 0, 16]


def test_rule_exponent_is_the_rounded_logarithm() -> None:
    rng = np.random.default_rng(2)
    amax = np.ldexp(rng.integers(1, 2**30, 20000).astype(np.float64), rng.integers(-190, 130, 20000))
    near = np.ldexp(np.round(np.ldexp(6 / np.sqrt(2), 27)) + np.arange(-3.0, 4.0), -27)
    amax = np.concatenate([amax, np.ldexp(near[:, None], np.arange(-160, 130)[None, :]).ravel(), [0.0]])
    expected = [scalar.rule_exponent(Fraction(a)) for a in amax.tolist()]
    assert quantize.rule_exponents(amax).tolist() == expected
