"""Checkpoint formats: exact values, any block shape, and refusals that name the tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import weights as source
from support.scalar_codec import as_float
from ziggurat.kernels.errors import CodecError, NonFiniteWeightError
from ziggurat.kernels.sources import SourceArrays, dequantize_source


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int64)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), format=st.sampled_from(source.FORMATS))
def test_values_are_exactly_those_of_the_scalar_implementation(seed: int, format: str) -> None:
    weight = source.awkward_weight(np.random.default_rng(seed), format, 16, 32 * (1 + seed % 3))
    expected = [[as_float(w) for w in row] for row in source.scalar_values(weight)]
    assert torch.equal(
        bits_of(dequantize_source(weight)), bits_of(torch.tensor(expected, dtype=torch.float64))
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), format=st.sampled_from(source.FORMATS))
def test_some_rows_are_those_of_the_whole(seed: int, format: str) -> None:
    rng = np.random.default_rng(seed)
    arrays = SourceArrays(source.awkward_weight(rng, format, 64, 96))
    start, stop = sorted(rng.integers(0, 65, 2).tolist())
    np.testing.assert_array_equal(arrays.values(start, stop), arrays.values(0, 64)[start:stop])


@settings(max_examples=60, deadline=None)
@given(bn=st.integers(1, 40), bk=st.integers(1, 80), N=st.integers(1, 40), K=st.integers(1, 80))
def test_fp8_blocks_of_any_shape(bn: int, bk: int, N: int, K: int) -> None:
    scale = torch.arange(1, 1 + -(-N // bn) * -(-K // bk)).float().reshape(-(-N // bn), -(-K // bk))
    weight = source.fp8(np.full((N, K), 0x38), scale, (bn, bk))
    expected = torch.tensor([[scale[n // bn, k // bk].item() for k in range(K)] for n in range(N)])
    assert torch.equal(dequantize_source(weight), expected.double())


def test_low_nibble_is_the_even_k() -> None:
    pairs = np.full((16, 16), 0x42, np.uint8)  # even k: 1.0, odd k: 2.0
    values = dequantize_source(source.mxfp4(pairs, np.full((16, 1), 127, np.uint8)))
    assert (values[:, 0::2] == 1.0).all()
    assert (values[:, 1::2] == 2.0).all()


def test_all_pairs_under_all_scale_bytes() -> None:
    pairs = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 256), (255, 1))
    scales = np.tile(np.arange(255, dtype=np.uint8)[:, None], (1, 16))
    weight = source.mxfp4(pairs, scales)
    expected = [[as_float(w) for w in row] for row in source.scalar_values(weight)]
    assert torch.equal(
        bits_of(dequantize_source(weight)), bits_of(torch.tensor(expected, dtype=torch.float64))
    )


def test_scale_that_is_not_a_number_is_refused() -> None:
    rng = np.random.default_rng(0)
    mx = source.awkward_weight(rng, "mxfp4", 16, 64, "a.w1")
    assert mx.scale is not None
    mx.scale[2, 1] = 255
    with pytest.raises(NonFiniteWeightError, match=r"a\.w1: its scale \[2, 1\]") as caught:
        dequantize_source(mx)
    assert caught.value.tensor == "a.w1"

    nv = source.awkward_weight(rng, "nvfp4", 16, 64, "a.w2")
    assert nv.scale is not None
    nv.scale.view(torch.uint8)[5, 3] = 0xFF
    with pytest.raises(NonFiniteWeightError, match=r"a\.w2: its scale \[5, 3\]"):
        dequantize_source(nv)
    nv = replace(source.awkward_weight(rng, "nvfp4", 16, 64, "a.w2"), scale_2=torch.tensor(float("inf")))
    with pytest.raises(NonFiniteWeightError, match=r"a\.w2: its scale_2 is inf"):
        dequantize_source(nv)

    for scale in (
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([[1.0, float("-inf")]]).bfloat16(),
        torch.tensor([[127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ):
        with pytest.raises(NonFiniteWeightError, match=r"a\.w3: its scale \[0, 1\]"):
            dequantize_source(source.fp8(np.zeros((16, 64)), scale, (16, 32), "a.w3"))


def test_misshapen_parts_are_named() -> None:
    good = source.fp8(np.zeros((16, 64)), torch.ones(1, 2), (16, 32), "m.w1")
    for bad, message in (
        (replace(good, scale=torch.ones(2, 2)), r"m\.w1: scale .* \[1, 2\], not float32 \[2, 2\]"),
        (replace(good, scale=torch.ones(1, 2, dtype=torch.int32)), r"m\.w1: scale .* not int32"),
        (replace(good, scale=None), r"m\.w1: a fp8_block weight needs its scale"),
        (replace(good, block=None), r"m\.w1: fp8_block needs a positive block shape"),
        (replace(good, block=(0, 32)), r"m\.w1: fp8_block needs a positive block shape"),
        (replace(good, shape=(16, 32)), r"m\.w1: data .* \[16, 32\], not float8_e4m3fn \[16, 64\]"),
        (replace(good, format="int4"), r"m\.w1: unknown format 'int4'"),
        (
            replace(good, format="mxfp4", shape=(16, 48)),
            r"m\.w1: mxfp4 needs K to be a multiple of 32, not 48",
        ),
        (replace(good, format="bf16"), r"m\.w1: data of a bf16 weight"),
    ):
        with pytest.raises(CodecError, match=message):
            dequantize_source(bad)
    nv = source.awkward_weight(np.random.default_rng(1), "nvfp4", 16, 32, "m.w2")
    with pytest.raises(CodecError, match=r"m\.w2: a nvfp4 weight needs its scale_2"):
        dequantize_source(replace(nv, scale_2=None))
    with pytest.raises(CodecError, match=r"m\.w2: scale_2 must be one float32"):
        dequantize_source(replace(nv, scale_2=torch.ones(2)))


def test_views_that_are_not_contiguous_read_the_same() -> None:
    values = torch.randn(64, 32).bfloat16()
    weight = source.Weight("t", "bf16", (32, 64), values.T)
    assert torch.equal(dequantize_source(weight), values.T.double())
