"""Every fast quantizer gives the bits of the float64 path."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import weights as source
from ziggurat.kernels.codecs.exact import exact_chunks
from ziggurat.kernels.codecs.fp8 import fp8_chunks, is_fast_fp8
from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.codecs.nvfp4 import is_fast_nvfp4, nvfp4_chunks
from ziggurat.kernels.codecs.quantizers import quantizer_of
from ziggurat.kernels.codecs.rounding import bf16_bits, bf16_rows
from ziggurat.kernels.codecs.tiled import Quantizer
from ziggurat.kernels.errors import NonFiniteWeightError, WeightRangeError
from ziggurat.kernels.sources import SourceArrays

GRIDS = {"w2": W2_GRID, "fp4": FP4_GRID}
FORMATS = [f for f in source.FORMATS if f != "mxfp4"]  # no arithmetic there; test_codecs has the scalar rows


def whole(quantizer: Quantizer, arrays: SourceArrays, alternate: bool, grid: Grid) -> tuple[np.ndarray, ...]:
    """Words, scales and zero counts of all rows together."""
    parts = list(quantizer(arrays, 0, arrays.rows, alternate, grid))
    assert [p[0] for p in parts[1:]] == [p[1] for p in parts[:-1]]
    zeros = np.array([[p.positive_zeros, p.negative_zeros] for _, _, p in parts]).sum(axis=0)
    return (
        np.concatenate([p.words for _, _, p in parts]),
        np.concatenate([p.scales for _, _, p in parts]),
        zeros if not grid.has_zero else np.zeros(2),
    )


def assert_same(weight: source.Weight, alternate: bool, grid: Grid) -> None:
    arrays = SourceArrays(weight)
    fast = whole(quantizer_of(arrays), arrays, alternate, grid)
    plain = whole(exact_chunks, arrays, alternate, grid)
    for got, expected in zip(fast, plain, strict=True):
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    format=st.sampled_from(FORMATS),
    codec=st.sampled_from(["w2", "fp4"]),
    alternate=st.booleans(),
)
def test_awkward_weights(seed: int, format: str, codec: str, alternate: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = source.awkward_weight(rng, format, 16 * int(rng.integers(1, 4)), 32 * int(rng.integers(1, 8)))
    assert_same(weight, alternate, GRIDS[codec])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from([k for k in source.KINDS if k not in ("tiny", "wild")]),
    format=st.sampled_from(["bf16", "f16", "f32"]),
    codec=st.sampled_from(["w2", "fp4"]),
)
def test_floats_of_one_kind_stay_on_the_integer_path(seed: int, kind: str, format: str, codec: str) -> None:
    """Without the blocks that send their rows to the float64 path."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
    values = source.awkward_values(np.random.default_rng(seed), 32, 128, (kind, "normal"))
    weight = source.Weight("w", format, (32, 128), torch.from_numpy(values).to(dtype))
    assert_same(weight, bool(seed & 1), GRIDS[codec])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    codec=st.sampled_from(["w2", "fp4"]),
    alternate=st.booleans(),
    scale=st.one_of(st.floats(2.0**-31, 2.0**100, width=32), st.integers(-31, 100).map(lambda e: 2.0**e)),
)
def test_fp8_under_any_scale(seed: int, codec: str, alternate: bool, scale: float) -> None:
    """Blocks of e4m3 bytes up to each largest byte, exact ones among them."""
    rng = np.random.default_rng(seed)
    top = rng.integers(0, 127, (32, 4, 1))
    data = np.minimum(rng.integers(0, 127, (32, 4, 32)), top)
    steps = np.array([0, 4, 8, 12, 16, 24, 128])  # 4, 3, 2, 1.5, 1, 0.5 and 0 below a power of two
    power = 8 * rng.integers(3, 16, (32, 4, 1))
    exact = np.maximum(power - steps[rng.integers(0, 7 if codec == "fp4" else 5, (32, 4, 32))], 0)
    exact[..., 0] = power[..., 0]
    data = np.where(rng.random((32, 4, 1)) < 0.5, exact, data)
    data |= rng.integers(0, 2, data.shape) << 7
    weight = source.fp8(data.reshape(32, 128), torch.full((1, 1), scale), (64, 128))
    assert is_fast_fp8(SourceArrays(weight))
    assert_same(weight, alternate, GRIDS[codec])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    codec=st.sampled_from(["w2", "fp4"]),
    alternate=st.booleans(),
    scale_2=st.one_of(st.floats(2.0**-30, 2.0**100, width=32), st.integers(-30, 100).map(lambda e: 2.0**e)),
)
def test_nvfp4_under_any_scale(seed: int, codec: str, alternate: bool, scale_2: float) -> None:
    """Scales far apart in a block, zero scales, and exact blocks."""
    rng = np.random.default_rng(seed)
    top = rng.integers(0, 8, (32, 8, 1))
    nibbles = np.minimum(rng.integers(0, 8, (32, 8, 16)), top) | (rng.integers(0, 2, (32, 8, 16)) << 3)
    nibbles = nibbles.reshape(32, 128).astype(np.uint8)
    centre = rng.integers(0, 127, (32, 4, 1))
    scales = np.clip(centre + rng.integers(-9, 10, (32, 4, 2)), 0, 126)
    scales = np.where(rng.random((32, 4, 1)) < 0.5, scales & ~7, scales)  # powers of two
    scales = np.where(rng.random((32, 4, 2)) < 0.1 * (seed % 3), 0, scales)
    pairs = np.ascontiguousarray(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))
    weight = source.nvfp4(pairs, scales.reshape(32, 8), scale_2)
    assert is_fast_nvfp4(SourceArrays(weight))
    assert_same(weight, alternate, GRIDS[codec])


@pytest.mark.parametrize("codec", ["w2", "fp4"])
@pytest.mark.parametrize("scale_2", [1.0, 0.0123, 2.0**-12])
def test_every_nvfp4_scale_beside_every_code(codec: str, scale_2: float) -> None:
    scales = np.zeros((127 * 16 // 16 * 16, 2), np.int64)
    scales[:, 0] = np.arange(scales.shape[0]) % 127
    scales[:, 1] = (scales[:, 0] + np.arange(scales.shape[0]) // 127 - 8).clip(0, 126)
    low = np.arange(8)
    nibbles = np.concatenate([np.tile(low, 2), np.tile(low[::-1], 2)]).astype(np.uint8)
    nibbles = np.tile(nibbles, (scales.shape[0], 1))
    nibbles[:, 8:16] = 0
    assert_same(
        source.nvfp4(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scales, scale_2), False, GRIDS[codec]
    )


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_every_pair_of_e4m3_bytes(codec: str) -> None:
    """Each byte below each largest byte, under scales one, odd and small."""
    top, other = np.meshgrid(np.arange(127), np.arange(127), indexing="ij")
    data = np.zeros((127 * 127 + 15, 32), np.int64)
    data[: 127 * 127, 0], data[: 127 * 127, 31] = top.ravel(), np.minimum(top, other).ravel()
    data[: 127 * 127, 1::2] = np.minimum(top, other).reshape(-1, 1) | 0x80
    data = data[: data.shape[0] // 16 * 16]
    for scale in (1.0, 0.6875, 2.0**-20, 1.0000001, 1.3333334):
        weight = source.fp8(data, torch.full((-(-data.shape[0] // 128), 1), scale), (128, 128))
        assert_same(weight, False, GRIDS[codec])


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_every_bf16_pattern(codec: str) -> None:
    """Alone in its block, and as the smaller weight beside each power of two and 1.5 times it."""
    finite = np.arange(0, 65536)
    finite = finite[(finite & 0x7F80) != 0x7F80]
    alone = np.zeros((finite.size, 32), np.int64)
    alone[:, 5] = finite
    beside = np.zeros((finite.size, 32), np.int64)
    beside[:, :] = finite[:, None]
    beside[:, 3] = np.minimum((finite & 0x7F80) + np.where(finite & 1, 0x100, 0x140), 0x7F00)
    for bits in (alone, beside):
        assert_same(source.from_bits("bf16", bits[: bits.shape[0] // 16 * 16]), False, GRIDS[codec])


@pytest.mark.parametrize("codec", ["w2", "fp4"])
@pytest.mark.parametrize("exponent", [-140, -118, -112, -104, -95, -60, -32, -31, 100, 101, 115])
def test_scales_at_and_beyond_the_limits_of_the_tables(codec: str, exponent: int) -> None:
    """Exact blocks in the reach of the rule's 1e-30, and exponents that need a limit."""
    rng = np.random.default_rng(exponent + 200)
    exact = np.array([0x48, 0x44, 0x40, 0x3C, 0x38, 0x30, 0x00])  # 4, 3, 2, 1.5, 1, 0.5, 0
    data = exact[rng.integers(0, 7, (32, 4, 32))]
    data[::2] = np.array([0x48, 0x38])[rng.integers(0, 2, (16, 4, 32))]
    data[1::4] = rng.integers(0, 127, (8, 4, 32))
    weight = source.fp8(data.reshape(32, 128), torch.full((1, 1), 2.0**exponent), (128, 128))
    assert is_fast_fp8(SourceArrays(weight)) == (-31 <= exponent <= 100)
    assert_same(weight, False, GRIDS[codec])
    nibbles = np.array([6, 2])[rng.integers(0, 2, (32, 128))]
    nibbles[1::2] = rng.integers(0, 8, (16, 128))
    pairs = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8)
    scales = np.full((32, 8), 0x38)
    weight = source.nvfp4(pairs, scales, 2.0**exponent)
    assert is_fast_nvfp4(SourceArrays(weight)) == (-30 <= exponent <= 100)
    assert_same(weight, False, GRIDS[codec])


def test_the_fast_paths_are_taken() -> None:
    """The tests above compare two paths, not one with itself."""
    rng = np.random.default_rng(0)
    for format in source.FORMATS:
        weight = source.awkward_weight(rng, format, 16, 64)
        if format == "fp8_block":
            weight = source.fp8(np.zeros((16, 64)), torch.full((1, 1), 0.01), (128, 128))
            assert quantizer_of(SourceArrays(weight)) is fp8_chunks
        if format == "nvfp4":
            weight = source.nvfp4(np.zeros((16, 32), np.uint8), np.full((16, 4), 0x38), 0.01)
            assert quantizer_of(SourceArrays(weight)) is nvfp4_chunks
        assert quantizer_of(SourceArrays(weight)) is not exact_chunks


def pieces_of(quantizer: Quantizer, arrays: SourceArrays, start: int, stop: int) -> Iterator[np.ndarray]:
    for _, _, part in quantizer(arrays, start, stop, False, W2_GRID):
        yield part.words


@pytest.mark.parametrize("format", source.FORMATS)
def test_a_part_of_the_rows_is_that_part_of_the_whole(format: str) -> None:
    arrays = SourceArrays(source.awkward_weight(np.random.default_rng(11), format, 96, 96))
    quantizer = quantizer_of(arrays)
    complete = np.concatenate(list(pieces_of(quantizer, arrays, 0, 96)))
    middle = np.concatenate(list(pieces_of(quantizer, arrays, 32, 80)))
    np.testing.assert_array_equal(middle, complete[2:5])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), format=st.sampled_from(source.FORMATS))
def test_bf16_rounding_is_that_of_the_exact_number(seed: int, format: str) -> None:
    rng = np.random.default_rng(seed)
    arrays = SourceArrays(
        source.awkward_weight(rng, format, 16 * int(rng.integers(1, 4)), 32 * int(rng.integers(1, 8)))
    )
    np.testing.assert_array_equal(bf16_rows(arrays, 0, arrays.rows), bf16_bits(arrays.values(0, arrays.rows)))
    np.testing.assert_array_equal(bf16_rows(arrays, 5, 13), bf16_bits(arrays.values(5, 13)))


def test_float32_ties_and_their_neighbours_round_to_bf16() -> None:
    """Half-way patterns at every exponent, one off on both sides, and the largest that does not overflow."""
    high = np.arange(0, 0x7F80, 5)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = np.concatenate([(high | low).ravel(), [0x7F7F7FFF]])
    bits = bits[bits <= 0x7F7F7FFF]
    bits = np.resize(bits, (bits.size // 32, 32))
    bits[::2] |= 0x80000000
    arrays = SourceArrays(source.from_bits("f32", bits))
    np.testing.assert_array_equal(bf16_rows(arrays, 0, arrays.rows), bf16_bits(arrays.values(0, arrays.rows)))
    over = SourceArrays(source.from_bits("f32", np.full((1, 32), 0x7F7F8000), "over"))
    with pytest.raises(WeightRangeError, match="tensor over"):
        bf16_rows(over, 0, 1)
    for nan in (0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF, 0xFF800000):
        with pytest.raises(NonFiniteWeightError, match="tensor nan"):
            bf16_rows(SourceArrays(source.from_bits("f32", np.full((1, 32), nan), "nan")), 0, 1)


def test_every_bf16_value_survives_float64() -> None:
    finite = np.arange(65536)
    finite = finite[(finite & 0x7F80) != 0x7F80]
    values = SourceArrays(source.from_bits("bf16", finite[:, None])).values(0, finite.size)
    np.testing.assert_array_equal(bf16_bits(values).ravel(), finite)
