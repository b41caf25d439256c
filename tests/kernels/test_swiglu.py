"""The kernels' activation and weighted sum on the CPU: near the exact numbers, and rounded as stated."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.kernels.cpu.swiglu import exp_plain, fused_multiply_add, swiglu, weighted_sum

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_exp_is_near_the_exact_one_and_cut_outside() -> None:
    v = np.linspace(-87, 88, 200001).astype(np.float32)
    assert np.abs(exp_plain(v) / np.exp(v.astype(np.float64)) - 1).max() < 3e-7
    assert (exp_plain(f32(-1e30, -np.inf, np.nan)) == exp_plain(f32(-87.0))).all()
    assert (exp_plain(f32(1e30, np.inf)) == exp_plain(f32(88.0))).all()
    assert exp_plain(f32(0.0)) == 1


def test_swiglu_and_its_limits() -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal(10000).astype(np.float32) * 10 for _ in range(2))
    exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    assert np.abs(swiglu(gate, up, None) - exact).max() <= 1e-6 * np.abs(exact).max()
    limited = swiglu(np.minimum(gate, np.float32(3)), np.clip(up, np.float32(-3), np.float32(3)), None)
    assert (swiglu(gate, up, 3.0) == limited).all()
    assert -1e-30 < swiglu(f32(-200.0), f32(1.0), None) < 0
    assert np.isnan(swiglu(f32(np.nan, 1, np.inf), f32(1, np.nan, 0), None)).all()
    assert swiglu(f32(np.inf), f32(2.0), 4.0) == swiglu(f32(4.0), f32(2.0), None)


def exact_f32(value: Fraction) -> float:
    """The nearest float32, ties to even, by search among the neighbours of float64's conversion."""
    near = np.float32(float(value))
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    finite = [c for c in candidates if np.isfinite(c)]
    return float(min(finite, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.uint32)) & 1)))


@settings(max_examples=500, deadline=None)
@given(FLOATS, FLOATS, FLOATS, st.integers(-30, 30))
def test_a_fused_multiply_add_rounds_once(a: float, b: float, c: float, shift: int) -> None:
    near_product = math.ldexp(a * b, shift) if a * b and abs(a * b) < 1e30 else c
    for addend in (c, float(np.float32(near_product)), -float(np.float32(a * b)) if abs(a * b) < 3e38 else c):
        if not math.isfinite(addend):  # the product was scaled beyond float32
            continue
        exact = Fraction(a) * Fraction(b) + Fraction(addend)
        if abs(exact) >= Fraction(2) ** 128 * (1 - Fraction(2) ** -25):
            continue
        got = fused_multiply_add(f32(a), f32(b), f32(addend))
        assert float(got[0]) == exact_f32(exact)


def test_ties_that_float64_alone_would_round_twice() -> None:
    """1 + 2^-24 + 2^-80 is above the tie; rounded to float64 first, it is the tie, which goes to the even 1."""
    got = fused_multiply_add(f32(2.0**-40), f32(2.0**-40), f32(1.0))
    assert got == 1
    a = f32(1 + 2.0**-23)
    got = fused_multiply_add(a, f32(2.0**-24), f32(1.0))  # 1 + 2^-24 + 2^-47
    assert got == np.nextafter(np.float32(1), np.float32(2))
    small = fused_multiply_add(f32(-(2.0**-60)), f32(2.0**-60), f32(1.0) + f32(2.0**-23))
    assert small == np.float32(1 + 2.0**-23)


def test_a_weighted_sum_goes_in_the_order_of_the_choices() -> None:
    partials = f32(2.0**24, 1, 1, 1, 1, 2.0**24).reshape(2, 3, 1)
    ones, here = np.ones((2, 3), np.float32), np.ones((2, 3), np.bool_)
    assert weighted_sum(partials, ones, here).ravel().tolist() == [2.0**24, 2.0**24 + 2]
    here[0, 0] = here[1, 2] = False
    assert weighted_sum(partials, ones, here).ravel().tolist() == [2, 2]
    nan = partials.copy()
    nan[0, 0] = np.nan
    assert weighted_sum(nan, ones, here)[0] == 2


@pytest.mark.parametrize("count", [1, 7])
def test_a_weighted_sum_of_nothing_is_zero(count: int) -> None:
    none = np.zeros((count, 2), np.bool_)
    assert (
        weighted_sum(np.full((count, 2, 3), np.nan, np.float32), np.ones((count, 2), np.float32), none) == 0
    ).all()
