"""Checkpoints that the measurements make are ones that the product reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import synthetic
from bench.heldout_loss import DEFAULT_MODEL
from ziggurat.kernels.sources import dequantize_source
from ziggurat.stores.checkpoint import Checkpoint


@pytest.mark.parametrize("source", ["bf16", "fp8_block"])
def test_experts_of_a_real_size(tmp_path: Path, source: str) -> None:
    nbytes = synthetic.write_experts(tmp_path / "model", source, layers=2, experts=1)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert (checkpoint.experts, checkpoint.hidden, checkpoint.intermediate) == (1, 2048, 768)
        assert checkpoint.format == source
        found = 0
        for layer in range(2):
            expert = checkpoint.expert(layer, 0)
            for weight in (expert.w1, expert.w3, expert.w2):
                found += sum(tensor.nbytes for tensor in (weight.data, weight.scale) if tensor is not None)
                values = dequantize_source(weight)
                assert 0.5 < values.std() * weight.shape[1] ** 0.5 < 1.5
        assert found == nbytes


def test_the_bf16_copy_holds_the_same_weights(tmp_path: Path) -> None:
    synthetic.write_bf16_copy(DEFAULT_MODEL, tmp_path / "copy")
    with Checkpoint.open(DEFAULT_MODEL) as fp8, Checkpoint.open(tmp_path / "copy") as bf16:
        assert (fp8.format, bf16.format) == ("fp8_block", "bf16")
        for layer, expert in ((0, 0), (5, 31)):
            for name in ("w1", "w3", "w2"):
                wanted = dequantize_source(getattr(fp8.expert(layer, expert), name))
                found = getattr(bf16.expert(layer, expert), name).data
                assert torch.equal(found.view(torch.int16), wanted.to(torch.bfloat16).view(torch.int16))
