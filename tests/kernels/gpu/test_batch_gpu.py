"""A GPU's rows are the codecs', byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import batches
from ziggurat.kernels.codecs.encoder import RowEncoder
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.errors import NonFiniteWeightError
from ziggurat.kernels.geometry import ExpertGeometry

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")
CODECS = ("w2", "fp4")


@pytest.mark.parametrize("format", batches.FORMATS)
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_batches_are_the_codecs_rows(seed: int, format: str, codec: str) -> None:
    batches.check_random_batch(seed, format, codec, GPU)


@pytest.mark.parametrize("codec", CODECS)
def test_every_bf16_number_under_every_fraction_of_the_largest(codec: str) -> None:
    batches.check_all(codec, batches.every_bf16(np.random.default_rng(1)), GPU)


@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 0.0123, 2.0**60, 1.0 / 3])
@pytest.mark.parametrize("codec", CODECS)
def test_every_fp8_byte_under_every_largest_one(codec: str, scale: float) -> None:
    batches.check_all(codec, batches.every_fp8(np.random.default_rng(2), scale), GPU)


@pytest.mark.parametrize("scale", [0.0123, 3e-5, 1.0 / 3])
@pytest.mark.parametrize("codec", CODECS)
def test_nvfp4_under_all_scales(codec: str, scale: float) -> None:
    batches.check_all(codec, batches.every_nvfp4(np.random.default_rng(3), scale), GPU)


@pytest.mark.parametrize("codec", [*CODECS, "bf16"])
@pytest.mark.parametrize("format", batches.FORMATS)
def test_encoders_on_both_devices_give_the_same_rows(format: str, codec: str) -> None:
    """A large expert, in several pieces, and one that only the codec itself can do."""
    rng = np.random.default_rng(4)
    hidden, intermediate = 512, 256
    experts = [batches.fast_expert(rng, format, hidden, intermediate, (128, 128)) for _ in range(3)]
    if format == "bf16":
        experts[1].w1.data[0, :32] = 2.0**-60
    rows = []
    for device in ("cpu", "cuda:0"):
        encoder = RowEncoder(get_codec(codec), ExpertGeometry(hidden, intermediate), device)
        out = {rank: torch.zeros(3, encoder.row_bytes(2), dtype=torch.uint8) for rank in (0, 1)}
        encoder.encode_many(experts, 2, out)
        rows.append(out)
    assert all(torch.equal(rows[0][rank], rows[1][rank]) for rank in (0, 1))


def test_not_a_number_is_refused_by_name() -> None:
    expert = batches.fast_expert(np.random.default_rng(6), "bf16", 64, 64, (32, 32))
    expert.w3.data[5, 6] = float("nan")
    encoder = RowEncoder(batches.tiled("w2"), ExpertGeometry(64, 64), "cuda:0")
    with pytest.raises(NonFiniteWeightError, match=r"w3.*\[5, 6\]"):
        encoder.encode_many([expert], 1, {0: torch.zeros(1, encoder.row_bytes(1), dtype=torch.uint8)})
