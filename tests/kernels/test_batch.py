"""The batch quantizer gives the codecs' rows, byte for byte, or says that it cannot. GPUs: gpu/test_batch_gpu.py."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import batches
from support import weights as source
from ziggurat.kernels.codecs.encoder import RowEncoder
from ziggurat.kernels.errors import CodecError, NonFiniteWeightError, WeightRangeError
from ziggurat.kernels.geometry import ExpertGeometry

CPU = torch.device("cpu")
CODECS = ("w2", "fp4")


@pytest.mark.parametrize("format", batches.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_batches_are_the_codecs_rows(seed: int, format: str, codec: str) -> None:
    batches.check_random_batch(seed, format, codec, CPU)


@pytest.mark.parametrize("codec", CODECS)
def test_every_bf16_number_under_every_fraction_of_the_largest(codec: str) -> None:
    batches.check_all(codec, batches.every_bf16(np.random.default_rng(1)), CPU)


@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 0.0123, 2.0**60, 1.0 / 3])
@pytest.mark.parametrize("codec", CODECS)
def test_every_fp8_byte_under_every_largest_one(codec: str, scale: float) -> None:
    batches.check_all(codec, batches.every_fp8(np.random.default_rng(2), scale), CPU)


@pytest.mark.parametrize("scale", [0.0123, 3e-5, 1.0 / 3])
@pytest.mark.parametrize("codec", CODECS)
def test_nvfp4_under_all_scales(codec: str, scale: float) -> None:
    batches.check_all(codec, batches.every_nvfp4(np.random.default_rng(3), scale), CPU)


@pytest.mark.parametrize("format", source.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_not_left_out_is_right(seed: int, format: str, codec: str) -> None:
    """Any weights at all: extremes, negative and power-of-two scales, formats without a fast path."""
    rng = np.random.default_rng(seed)
    expert = source.awkward_expert(rng, format, 64, 32)
    rows, odd = batches.batch_rows(batches.tiled(codec), [expert], 1, CPU, 1 << 18)
    if not odd:
        assert torch.equal(rows[0], batches.expected_rows(batches.tiled(codec), [expert], 1)[0])


@pytest.mark.parametrize("what", ["inf", "nan", "tiny", "fp8 nan", "mxfp4 range", "nvfp4 negative", "f32"])
@pytest.mark.parametrize("codec", CODECS)
def test_odd_experts_are_named_and_the_others_done(codec: str, what: str) -> None:
    rng = np.random.default_rng(5)
    format = {"f": "f32", "m": "mxfp4"}.get(what[0], "bf16")
    format = "fp8_block" if what == "fp8 nan" else "nvfp4" if what.startswith("nvfp4") else format
    if format == "f32":
        experts = [source.awkward_expert(rng, format, 64, 64) for _ in range(3)]
        assert batches.batch_rows(batches.tiled(codec), experts, 1, CPU, 1 << 18)[1] == [0, 1, 2]
        return
    experts = [batches.fast_expert(rng, format, 64, 64, (32, 32)) for _ in range(3)]
    bad = experts[1].w3
    if format == "bf16":
        bad.data[5, 6] = {"inf": float("-inf"), "nan": float("nan"), "tiny": 0.0}[what]
        if what == "tiny":
            bad.data[5, :32] = 2.0**-60
    elif format == "fp8_block":
        bad.data.view(torch.uint8)[5, 6] = 0xFF
    elif format == "mxfp4":
        assert bad.scale is not None
        bad.scale[5, 1] = 253
    else:
        assert bad.scale is not None
        bad.scale.view(torch.uint8)[5, 1] |= 0x80
    for pieces in (1, 1 << 18):
        rows, odd = batches.batch_rows(batches.tiled(codec), experts, 1, CPU, pieces)
        assert odd == [1]
        others = [experts[0], experts[2]]
        expected = batches.expected_rows(batches.tiled(codec), others, 1)[0]
        assert torch.equal(rows[0][[0, 2]], expected)


@pytest.mark.parametrize("codec", CODECS)
def test_zero_mode_is_each_tensors_own_and_a_wrong_guess_is_mended(codec: str) -> None:
    dense = torch.ones(64, 64)
    one_sign, both_signs = dense.clone(), dense.clone()
    one_sign[40:, ::3] = 0.0
    both_signs[:, ::3] = 0.0
    both_signs[40:, ::3] = -0.0
    weights = [source.Weight("w", "bf16", (64, 64), v.bfloat16()) for v in (one_sign, both_signs, dense)]
    experts = [source.Expert(w, w, w) for w in (*weights, *reversed(weights))]
    expected = batches.expected_rows(batches.tiled(codec), experts, 2)
    for pieces in (1, 64 * 64 * 2, 1 << 18):
        rows, odd = batches.batch_rows(batches.tiled(codec), experts, 2, CPU, pieces)
        assert odd == []
        assert all(torch.equal(rows[rank], expected[rank]) for rank in (0, 1))


def test_misaligned_and_transposed_tensors() -> None:
    """As checkpoints have them: at any multiple of the element's size, and fused tensors the other way round."""
    rng = np.random.default_rng(7)
    expert = batches.fast_expert(rng, "bf16", 64, 64, (32, 32))

    def shifted(weight: source.Weight) -> source.Weight:
        room = torch.zeros(weight.data.numel() + 3, dtype=weight.data.dtype)
        room[3:] = weight.data.reshape(-1)
        return replace(weight, data=room[3:].view(weight.shape))

    def turned(weight: source.Weight) -> source.Weight:
        return replace(weight, data=weight.data.T.contiguous().T)

    experts = [
        source.Expert(shifted(expert.w1), turned(expert.w3), expert.w2),
        source.Expert(turned(expert.w1), expert.w3, shifted(expert.w2)),
    ]
    rows, odd = batches.batch_rows(batches.tiled("w2"), experts, 1, CPU, 1 << 18)
    assert odd == []
    assert torch.equal(rows[0], batches.expected_rows(batches.tiled("w2"), [expert, expert], 1)[0])


def test_an_encoder_crosses_to_another_process_with_its_errors() -> None:
    rng = np.random.default_rng(8)
    experts = [batches.fast_expert(rng, "bf16", 64, 32, (32, 32)) for _ in range(2)]
    encoder: RowEncoder = pickle.loads(pickle.dumps(RowEncoder(batches.tiled("w2"), ExpertGeometry(64, 32))))
    rows = torch.zeros(2, encoder.row_bytes(1), dtype=torch.uint8)
    encoder.encode_many(experts, 1, {0: rows})
    assert torch.equal(rows, batches.expected_rows(batches.tiled("w2"), experts, 1)[0])
    for error in (NonFiniteWeightError("t", "d"), WeightRangeError("t", "d")):
        again: CodecError = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
