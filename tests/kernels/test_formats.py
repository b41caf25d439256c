"""Every code of every element format against the scalar implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support import scalar_codec as scalar
from support.weights import Weight, from_bits
from ziggurat.kernels.errors import NonFiniteWeightError
from ziggurat.kernels.formats import E2M1_MIDPOINTS, E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, float32_bits
from ziggurat.kernels.sources import dequantize_source


def same(value: float, expected: scalar.Weight) -> bool:
    return abs(value) == float(expected[0]) and math.copysign(1.0, value) == (-1.0 if expected[1] else 1.0)


def test_every_e4m3_byte_has_its_value() -> None:
    for byte in range(256):
        expected = scalar.e4m3(byte)
        assert math.isnan(E4M3_VALUES[byte]) if expected is None else same(E4M3_VALUES[byte], expected)


def test_every_e2m1_nibble_has_its_value() -> None:
    assert all(same(E2M1_VALUES[nibble], scalar.e2m1(nibble)) for nibble in range(16))
    assert E2M1_MIDPOINTS.tolist() == [
        float(a + b) / 2 for a, b in zip(scalar.E2M1, scalar.E2M1[1:], strict=False)
    ]


def test_every_e8m0_byte_has_its_value() -> None:
    for byte in range(255):
        assert E8M0_VALUES[byte] == math.ldexp(1.0, byte - 127) == float(scalar.e8m0(byte) or 0)
    assert E8M0_VALUES[0] == 2.0**-127
    assert math.isnan(E8M0_VALUES[255])
    assert scalar.e8m0(255) is None


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_e4m3_nan_bytes_are_refused_by_tensor_name(byte: int) -> None:
    data = torch.full((16, 32), 0x38, dtype=torch.uint8)
    data[3, 7] = byte
    weight = Weight(
        "layers.4.w1", "fp8_block", (16, 32), data.view(torch.float8_e4m3fn), torch.ones(1, 1), None, (16, 32)
    )
    with pytest.raises(NonFiniteWeightError, match=r"layers\.4\.w1.*\[3, 7\]"):
        dequantize_source(weight)


def test_all_bf16_patterns() -> None:
    bits = np.arange(65536).reshape(512, 128)
    finite = (bits & 0x7F80) != 0x7F80
    values = dequantize_source(from_bits("bf16", np.where(finite, bits, 0))).numpy()
    for pattern, value in zip(bits[finite].tolist(), values[finite].tolist(), strict=True):
        expected = scalar.bf16(pattern)
        assert expected is not None
        assert same(value, expected)


def test_all_f16_patterns() -> None:
    bits = np.arange(65536).reshape(512, 128)
    finite = (bits & 0x7C00) != 0x7C00
    values = dequantize_source(from_bits("f16", np.where(finite, bits, 0))).numpy()
    for pattern, value in zip(bits[finite].tolist(), values[finite].tolist(), strict=True):
        expected = scalar.f16(pattern)
        assert expected is not None
        assert same(value, expected)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF])
def test_bf16_infinity_and_nan_are_refused_by_tensor_name(pattern: int) -> None:
    bits = np.zeros((16, 32), np.int64)
    bits[15, 31] = pattern
    with pytest.raises(NonFiniteWeightError, match=r"tensor up.*\[15, 31\]"):
        dequantize_source(from_bits("bf16", bits, "up"))


def test_every_float16_widens_to_float32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    wide = float32_bits(bits).view(np.float32)
    expected = bits.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert (np.isnan(wide) == nan).all()
    assert wide[~nan].tobytes() == expected[~nan].tobytes()
