"""The few facts of a model's config.json that say which expert tensors its checkpoint must hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ziggurat.stores.errors import CheckpointError

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_NESTED_KEYS = ("text_config", "llm_config", "language_config")
_MOST_LAYERS, _MOST_EXPERTS = 1024, 4096  # far above any model; a nonsensical config must not exhaust memory
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """layers: all main decoder layers, dense ones too; moe_layers: the numbers of those with routed experts.

    hidden, intermediate: H and the I of one routed expert. block: (bn, bk) of FP8 block scales if stated.
    dtype: of the tensors that are not quantized, if stated.
    """

    architecture: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    block: tuple[int, int] | None
    dtype: torch.dtype | None


def read_model_config(folder: Path) -> ModelConfig:
    """Read a checkpoint folder's `config.json`. Raises CheckpointError naming the key that is wrong."""
    path = folder / "config.json"
    top = _load(path)
    body = next((body for body in _bodies(top) if _expert_count_key(body)), top)
    count_key = _expert_count_key(body)
    if count_key is None:
        keys = ", ".join(_EXPERT_COUNT_KEYS)
        raise CheckpointError(f"{path}: none of {keys} is set, so this is not a Mixture-of-Experts model")
    layers = _count(path, body, "num_hidden_layers", _MOST_LAYERS)
    moe_layers = tuple(layer for layer in range(layers) if _is_moe(path, body, layer))
    if not moe_layers:
        raise CheckpointError(f"{path}: not one of the {layers} layers has routed experts")
    return ModelConfig(
        architecture=_architecture(top),
        layers=layers,
        moe_layers=moe_layers,
        experts=_count(path, body, count_key, _MOST_EXPERTS),
        top_k=_count(path, body, "num_experts_per_tok"),
        hidden=_count(path, body, "hidden_size"),
        intermediate=_count(
            path, body, "moe_intermediate_size" if "moe_intermediate_size" in body else "intermediate_size"
        ),
        block=_block(path, top),
        dtype=_dtype(path, top, body),
    )


def stated_block(folder: Path) -> tuple[int, int] | None:
    """The FP8 block shape `config.json` states, or None. Raises CheckpointError for a malformed one."""
    path = folder / "config.json"
    return _block(path, _load(path))


def _bodies(top: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The places where a language model's facts may stand, the nested ones first."""
    return [*(top[key] for key in _NESTED_KEYS if isinstance(top.get(key), dict)), top]


def _expert_count_key(body: Mapping[str, Any]) -> str | None:
    return next((key for key in _EXPERT_COUNT_KEYS if body.get(key) is not None), None)


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError as e:
        raise CheckpointError(f"{path.parent}: no config.json, so this is not a model folder") from e
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not JSON: {e}") from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config


def _count(path: Path, body: Mapping[str, Any], key: str, most: int = 1 << 24) -> int:
    value = body.get(key)
    if value is None:
        raise CheckpointError(f"{path}: {key} is missing")
    if type(value) is not int or not 0 < value <= most:
        raise CheckpointError(f"{path}: {key} is {value!r}, not a number from 1 to {most}")
    return value


def _architecture(top: Mapping[str, Any]) -> str:
    names = top.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return str(top.get("model_type", "unknown"))


def _is_moe(path: Path, body: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has routed experts, by the keys the model families use for that.

    DeepSeek, GLM: first_k_dense_replace, moe_layer_freq (a period, or one flag a layer); Qwen:
    decoder_sparse_step, mlp_only_layers.
    """
    first = _number(path, body, "first_k_dense_replace", 0)
    step = _number(path, body, "decoder_sparse_step", 1) or 1
    dense = body.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"{path}: mlp_only_layers is {dense!r}, not a list of layer numbers")
    period = body.get("moe_layer_freq") or 1
    if isinstance(period, list):
        here = layer < len(period) and bool(period[layer])
    else:
        here = layer % max(_number(path, body, "moe_layer_freq", 1), 1) == 0
    return layer >= first and (layer + 1) % step == 0 and layer not in dense and here


def _number(path: Path, body: Mapping[str, Any], key: str, default: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, not a number")
    return value


def _block(path: Path, top: Mapping[str, Any]) -> tuple[int, int] | None:
    stated = (body.get("quantization_config") for body in reversed(_bodies(top)))
    quantization: Any = next((q for q in stated if q is not None), {})
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path}: quantization_config is not a JSON object")
    block = quantization.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise CheckpointError(f"{path}: weight_block_size is {block!r}, not two positive numbers")
    return block[0], block[1]


def _dtype(path: Path, top: Mapping[str, Any], body: Mapping[str, Any]) -> torch.dtype | None:
    name = next((c[k] for c in (body, top) for k in ("dtype", "torch_dtype") if c.get(k) is not None), None)
    if name is None:
        return None
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{path}: dtype is {name!r}; {', '.join(_DTYPES)} are known")
    return dtype
