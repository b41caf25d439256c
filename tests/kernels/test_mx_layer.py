"""The model of the block-scaled path over whole experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from support import layers
from ziggurat.kernels.codecs.layout import read_words
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.codecs.tiled import TiledCodec
from ziggurat.kernels.cpu import mx_layer
from ziggurat.kernels.cpu.block_scaled import E5M2_VALUES
from ziggurat.kernels.cpu.mx_layer import DECODE_SPLITS, PREFILL_SPLITS, mx_expert, operand_a

SHAPES = [(32, 32), (96, 160), (256, 128)]


def tiled(name: str) -> TiledCodec:
    return cast(TiledCodec, get_codec(name))


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_operand_a_is_the_decoded_weights_without_scales(codec: str) -> None:
    implementation = tiled(codec)
    layer = layers.random_layer(codec, 96, 160, 1, 1)
    row = layer.rows[0].numpy()
    decoded = implementation.decode(layer.rows[0], layer.geometry)
    words = implementation.grid.words
    post = 8.0 if codec == "w2" else 2.0**14
    for section, matrix in zip(
        implementation.sections(layer.geometry)[::2], (decoded.w13, decoded.w2), strict=True
    ):
        rows, cols = matrix.shape
        plane = row[section.offset : section.offset + section.nbytes]
        lanes = read_words(plane, rows // 16, cols // 32, np.uint32 if words == 1 else np.uint64)
        values = E5M2_VALUES[operand_a(lanes, words).reshape(rows, cols)] * post
        ratio = matrix.double().numpy().reshape(rows, -1, 32), values.reshape(rows, -1, 32)
        assert (np.signbit(ratio[0]) == np.signbit(ratio[1])).all()
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.nanmax(np.abs(ratio[0] / ratio[1]), axis=2, keepdims=True)
        assert (ratio[1] * np.nan_to_num(scale) == ratio[0]).all()


@pytest.mark.parametrize("splits", [DECODE_SPLITS, PREFILL_SPLITS])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_an_expert_is_near_float64_over_the_same_quantized_activations(
    codec: str, hidden: int, intermediate: int, clamp: float | None, outliers: bool, splits: int
) -> None:
    layer = layers.random_layer(codec, hidden, intermediate, 1, 1, clamp)
    batch = layers.random_batch(layer, 5, torch.float16, outliers=outliers)
    expert = mx_expert(batch.x, layer.rows[0], tiled(codec), layer.geometry, clamp=clamp, splits=splits)
    expected = layers.reference(layer, batch, quantize=layers.mxfp8_of(torch.float16))
    assert expert.hidden.shape == (5, intermediate)
    # A hidden number at the edge between two codes may go to either: that, not the sums, is what the bound is for.
    assert layers.relative_error(expert.partial, expected) < 1e-3
    exact = layers.reference(layer, batch)
    assert layers.relative_error(expert.partial, exact) < 0.2


def test_the_model_divides_k_as_the_kernels_do() -> None:
    source = Path(mx_layer.__file__).resolve().parents[1] / "cuda" / "src" / "decode.cuh"
    found = re.findall(r"DECODE_WARPS = (\d+);", source.read_text())
    assert found == [str(DECODE_SPLITS)]


def test_a_token_alone_has_the_same_bits() -> None:
    layer = layers.random_layer("w2", 256, 128, 1, 1)
    batch = layers.random_batch(layer, 9, torch.bfloat16)
    together = mx_expert(batch.x, layer.rows[0], tiled("w2"), layer.geometry)
    for token in range(9):
        alone = mx_expert(batch.x[token : token + 1], layer.rows[0], tiled("w2"), layer.geometry)
        assert layers.same_bits(alone.partial[0], together.partial[token])
        assert layers.same_bits(alone.hidden[0], together.hidden[token])
