"""Facts from config.json, by model family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.modelconfig import read_model_config, stated_block

BASE: dict[str, Any] = {
    "architectures": ["SomeMoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, **changes: Any) -> Path:
    config = {k: v for k, v in {**BASE, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_plain(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert config.architecture == "SomeMoeForCausalLM"
    assert (config.layers, config.moe_layers) == (6, (0, 1, 2, 3, 4, 5))
    assert (config.experts, config.top_k, config.hidden, config.intermediate) == (8, 2, 64, 32)
    assert (config.block, config.dtype) == (None, torch.bfloat16)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_expert_count_keys(tmp_path: Path, key: str) -> None:
    assert read_model_config(write(tmp_path, **{"num_experts": ..., key: 5})).experts == 5


def test_moe_intermediate_size_wins(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, moe_intermediate_size=16)).intermediate == 16


def test_text_config(tmp_path: Path) -> None:
    nested = {**BASE, "num_experts": 3, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": nested}))
    config = read_model_config(tmp_path)
    assert (config.experts, config.architecture, config.dtype) == (3, "X", torch.float16)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 0]}, (1, 2, 4)),
        ({"moe_layer_freq": [0, 1]}, (1,)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_moe_layers(tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read_model_config(write(tmp_path, **changes)).moe_layers == layers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts": ...}, "not a Mixture-of-Experts model"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 2**40}, "num_experts is 1099511627776, not a number from 1 to 4096"),
        ({"num_experts": [1]}, r"num_experts is \[1\]"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"first_k_dense_replace": 6}, "not one of the 6 layers"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'"),
        ({"quantization_config": []}, "quantization_config is not"),
        ({"quantization_config": {"weight_block_size": [128]}}, r"weight_block_size is \[128\]"),
        ({"quantization_config": {"weight_block_size": [128, 0]}}, "weight_block_size"),
    ],
)
def test_bad_config_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        read_model_config(write(tmp_path, **changes))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100000])
def test_config_that_is_no_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json: not"):
        read_model_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model_config(tmp_path)


def test_block(tmp_path: Path) -> None:
    quantization = {"weight_block_size": [64, 128]}
    assert stated_block(write(tmp_path, quantization_config=quantization)) == (64, 128)
    assert stated_block(write(tmp_path, quantization_config=None)) is None
    assert stated_block(write(tmp_path, text_config={"quantization_config": quantization})) == (64, 128)
