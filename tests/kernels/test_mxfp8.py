"""MXFP8 activations, against the rule in exact fractions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import scalar_mx as scalar
from ziggurat.kernels.cpu.mxfp8 import dequantize_mxfp8, e4m3_codes, quantize_mxfp8
from ziggurat.kernels.formats import E4M3_VALUES


def test_every_e4m3_number_and_every_midpoint() -> None:
    numbers = E4M3_VALUES[:127]
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate(
        [numbers, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9), [449, 464, 1e30, math.inf]]
    )
    values = np.concatenate([values, -values])
    assert e4m3_codes(values).tolist() == [scalar.e4m3_nearest(v) for v in values.tolist()]
    assert (e4m3_codes(np.array([math.nan, -math.nan])) & 0x7F == 0x7F).all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    st.integers(-149, 0),
)
def test_a_block_is_the_scalar_one(values: list[float], shift: int) -> None:
    for block in (values, [math.ldexp(v, shift) for v in values]):
        x = np.array(block, np.float32)
        codes, scales = quantize_mxfp8(x)
        expected, byte = scalar.mxfp8_block(x.tolist())
        assert (codes.tolist(), scales.tolist()) == (expected, [byte])
        assert dequantize_mxfp8(codes, scales).tolist() == scalar.dequantized(expected, byte)


def test_blocks_are_quantized_apart() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 96)).astype(np.float32) * np.float32(100)
    codes, scales = quantize_mxfp8(x)
    assert codes.shape == (3, 5, 96)
    assert scales.shape == (3, 5, 3)
    for index in np.ndindex(3, 5, 3):
        block = slice(32 * index[2], 32 * index[2] + 32)
        alone, scale = quantize_mxfp8(x[index[0], index[1], block])
        assert (codes[index[0], index[1], block] == alone).all()
        assert scales[index] == scale[0]


def test_numbers_are_close_and_zeros_stay_zero() -> None:
    x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    x[3] = 0
    back = dequantize_mxfp8(*quantize_mxfp8(x))
    assert (back[3] == 0).all()
    assert (
        np.abs(back - x).reshape(64, 8, 32).max(axis=2) <= np.abs(x).reshape(64, 8, 32).max(axis=2) / 8
    ).all()
    assert np.linalg.norm(back - x) < 0.04 * np.linalg.norm(x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad: float) -> None:
    x = np.ones(96, np.float32)
    x[40] = bad
    codes, scales = quantize_mxfp8(x)
    assert scales.tolist() == [119, 255, 119]
    back = dequantize_mxfp8(codes, scales)
    assert np.isnan(back[32:64]).all()
    assert (back[:32] == 1).all()
    assert (back[64:] == 1).all()
