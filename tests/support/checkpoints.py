"""Tiny checkpoints for tests, written directly with safetensors.

Their experts are strong: with default-initialised weights a missing or wrong expert changes the output so little that
a test cannot see it. Here the expert matrices have gains above one and the router is sharp, so that a wrong expert
changes the routing of later layers too. The configurations of the bf16 kinds boot in stock vLLM.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from safetensors.torch import save_file

from support.quantized import quantize

Kind = Literal["qwen3", "olmoe", "mixtral", "deepseek2", "deepseek3", "deepseek4"]
Format = Literal["bf16", "f16", "f32", "fp8_block", "nvfp4", "mxfp4"]
Layout = Literal["per-expert", "fused", "fused-transposed"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class Written:
    """What was written. experts: (layer, expert, "w1"|"w3"|"w2") -> the matrix before quantization, f32 [N, K]."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    experts: dict[tuple[int, int, str], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shape of the model. hidden != intermediate != 2 * hidden, so that no mix-up of the two goes unseen."""

    layers: int = 4
    experts: int = 16
    top_k: int = 4
    hidden: int = 192
    intermediate: int = 128
    vocab: int = 8192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    first_dense: int = 1  # DeepSeek only: leading layers without routed experts
    mtp_layers: int = 0  # extra layers behind the main ones, with expert tensors


class SizeArgs(TypedDict, total=False):
    """`Sizes` as keyword arguments."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    first_dense: int
    mtp_layers: int


@dataclass
class _Writer:
    kind: Kind
    size: Sizes
    format: Format
    layout: Layout
    block: tuple[int, int]
    gain: float
    gate: float
    generator: torch.Generator
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    experts: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES.get(self.format, torch.bfloat16)

    def random(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator).mul(gain / columns**0.5)

    def put(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = value.to(self.dtype).contiguous()

    def ones(self, name: str, n: int) -> None:
        self.put(name, torch.ones(n))


def write_checkpoint(
    folder: Path,
    kind: Kind = "qwen3",
    format: Format = "bf16",
    layout: Layout = "per-expert",
    *,
    shards: int = 1,
    seed: int = 0,
    block: tuple[int, int] = (128, 128),
    gain: float = 1.5,
    gate: float = 3.0,
    tokenizer: Path | None = None,
    config: Mapping[str, Any] | None = None,
    **sizes: Unpack[SizeArgs],
) -> Written:
    """Write a checkpoint folder; the same arguments write the same bytes.

    sizes: fields of `Sizes`. block: of FP8 scales. tokenizer: folder to copy tokenizer files from.
    config: entries that override config.json's. `kind` deepseek4 follows DeepSeek-V4's tensor names and serves for
    reading only.
    """
    w = _Writer(kind, Sizes(**sizes), format, layout, block, gain, gate, torch.Generator().manual_seed(seed))
    _backbone(w)
    for layer in range(w.size.layers + w.size.mtp_layers):
        if is_moe_layer(kind, w.size, layer):
            _moe_layer(w, layer)
    text = {**_config(w), **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(text, indent=1))
    save_shards(folder, w.tensors, shards)
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        if tokenizer is not None and (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)
    return Written(folder, text, w.tensors, w.experts)


def save_shards(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    """Write `model.safetensors`, or `shards` files of about equally many tensors and their index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        part: Sequence[str] = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def is_moe_layer(kind: Kind, size: Sizes, layer: int) -> bool:
    return kind not in ("deepseek2", "deepseek3") or layer >= size.first_dense


def layer_prefix(kind: Kind, layer: int) -> str:
    """What the names of a layer's expert tensors start with, up to `experts`."""
    if kind == "deepseek4":
        return f"layers.{layer}.ffn."
    return f"model.layers.{layer}." + ("block_sparse_moe." if kind == "mixtral" else "mlp.")


def expert_name(kind: Kind, layer: int, expert: int, matrix: str) -> str:
    """An expert matrix's name in the per-expert layout, without `.weight`."""
    part = matrix if kind in ("mixtral", "deepseek4") else _NAMES[matrix]
    return f"{layer_prefix(kind, layer)}experts.{expert}.{part}"


def _backbone(w: _Writer) -> None:
    s, deepseek = w.size, w.kind in ("deepseek2", "deepseek3", "deepseek4")
    top = "" if w.kind == "deepseek4" else "model."
    w.put(f"{top}embed_tokens.weight", torch.randn(s.vocab, s.hidden, generator=w.generator))
    w.ones(f"{top}norm.weight", s.hidden)
    w.put("lm_head.weight", w.random(s.vocab, s.hidden, 3.0))
    for layer in range(s.layers):
        p = f"{top}layers.{layer}."
        w.ones(p + "input_layernorm.weight", s.hidden)
        w.ones(p + "post_attention_layernorm.weight", s.hidden)
        (_latent_attention if deepseek else _attention)(w, p + "self_attn.")
        if not is_moe_layer(w.kind, s, layer):
            w.put(p + "mlp.gate_proj.weight", w.random(2 * s.hidden, s.hidden))
            w.put(p + "mlp.up_proj.weight", w.random(2 * s.hidden, s.hidden))
            w.put(p + "mlp.down_proj.weight", w.random(s.hidden, 2 * s.hidden))


def _attention(w: _Writer, p: str) -> None:
    s = w.size
    heads, kv_heads, dim = s.heads, s.kv_heads, s.head_dim
    if w.kind == "olmoe":  # has no head_dim of its own
        heads, kv_heads, dim = _olmoe_heads(s), _olmoe_heads(s), s.hidden // _olmoe_heads(s)
    w.put(p + "q_proj.weight", w.random(heads * dim, s.hidden))
    w.put(p + "k_proj.weight", w.random(kv_heads * dim, s.hidden))
    w.put(p + "v_proj.weight", w.random(kv_heads * dim, s.hidden))
    w.put(p + "o_proj.weight", w.random(s.hidden, heads * dim))
    if w.kind == "qwen3":
        w.ones(p + "q_norm.weight", dim)
        w.ones(p + "k_norm.weight", dim)
    if w.kind == "olmoe":
        w.ones(p + "q_norm.weight", s.hidden)
        w.ones(p + "k_norm.weight", s.hidden)


def _olmoe_heads(size: Sizes) -> int:
    return size.hidden // 32


_NOPE, _ROPE, _VALUE, _LORA = 32, 32, 64, 64


def _latent_attention(w: _Writer, p: str) -> None:
    s = w.size
    w.put(p + "q_proj.weight", w.random(s.heads * (_NOPE + _ROPE), s.hidden))
    w.put(p + "kv_a_proj_with_mqa.weight", w.random(_LORA + _ROPE, s.hidden))
    w.ones(p + "kv_a_layernorm.weight", _LORA)
    w.put(p + "kv_b_proj.weight", w.random(s.heads * (_NOPE + _VALUE), _LORA))
    w.put(p + "o_proj.weight", w.random(s.hidden, s.heads * _VALUE))


def _moe_layer(w: _Writer, layer: int) -> None:
    s, p = w.size, layer_prefix(w.kind, layer)
    w.put(p + "gate.weight", w.random(s.experts, s.hidden, w.gate))
    if w.kind == "deepseek3":
        bias = torch.randn(s.experts, generator=w.generator) * 0.05
        w.tensors[p + "gate.e_score_correction_bias"] = bias
    shapes = {
        "w1": (s.intermediate, s.hidden),
        "w3": (s.intermediate, s.hidden),
        "w2": (s.hidden, s.intermediate),
    }
    for expert in range(s.experts):
        for matrix, (rows, columns) in shapes.items():
            gain = 2 * w.gain if matrix == "w2" else w.gain
            value = w.random(rows, columns, gain).to(w.dtype)
            w.experts[layer, expert, matrix] = value.float()
            if w.layout == "per-expert":
                name = expert_name(w.kind, layer, expert, matrix)
                for suffix, tensor in quantize(value, w.format, w.block).items():
                    w.tensors[f"{name}.{_suffix(w, suffix)}"] = tensor
    if w.layout != "per-expert":
        _fuse(w, layer, p + "experts.")
    if w.kind in ("deepseek2", "deepseek3", "deepseek4"):
        for matrix, (rows, columns) in shapes.items():
            name = f"{p}shared_experts.{matrix if w.kind == 'deepseek4' else _NAMES[matrix]}.weight"
            w.put(name, w.random(rows, columns))


def _suffix(w: _Writer, suffix: str) -> str:
    """DeepSeek-V4 calls the block scales of its own formats just `scale`."""
    own = w.kind == "deepseek4" and w.format in ("fp8_block", "mxfp4")
    return "scale" if own and suffix.startswith("weight_scale") else suffix


_FUSED_SUFFIXES = {
    "weight": "",
    "weight_scale_inv": "_scale_inv",
    "weight_scale": "_scale",
    "weight_scale_2": "_scale_2",
    "input_scale": "_input_scale",
}


def _fuse(w: _Writer, layer: int, p: str) -> None:
    numbers = range(w.size.experts)
    pairs = [torch.cat([w.experts[layer, e, "w1"], w.experts[layer, e, "w3"]]) for e in numbers]
    for name, matrices in (
        ("gate_up_proj", pairs),
        ("down_proj", [w.experts[layer, e, "w2"] for e in numbers]),
    ):
        parts = [quantize(matrix.to(w.dtype), w.format, w.block) for matrix in matrices]
        for suffix in parts[0]:
            stacked = torch.stack([part[suffix] for part in parts])
            if w.layout == "fused-transposed" and stacked.ndim == 3:
                stacked = stacked.transpose(1, 2).contiguous()
            w.tensors[p + name + _FUSED_SUFFIXES[suffix]] = stacked


def _config(w: _Writer) -> dict[str, Any]:
    s = w.size
    config: dict[str, Any] = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": s.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": _DTYPE_NAMES[w.dtype],
        "attention_bias": False,
        "num_experts_per_tok": s.top_k,
        **_KIND_CONFIGS[w.kind],
    }
    if w.kind in ("qwen3", "olmoe"):
        config["num_experts"] = s.experts
    elif w.kind == "mixtral":
        config["num_local_experts"] = s.experts
    else:
        config["n_routed_experts"] = s.experts
    if w.kind in ("olmoe", "mixtral"):
        config["intermediate_size"] = s.intermediate
    else:
        config |= {"moe_intermediate_size": s.intermediate, "intermediate_size": 2 * s.hidden}
    if w.kind in ("qwen3", "mixtral"):
        config["head_dim"] = s.head_dim
    if w.kind == "olmoe":
        config |= {"num_attention_heads": _olmoe_heads(s), "num_key_value_heads": _olmoe_heads(s)}
    if w.kind in ("deepseek2", "deepseek3"):
        config |= {
            "num_key_value_heads": s.heads,
            "first_k_dense_replace": s.first_dense,
            "num_nextn_predict_layers": s.mtp_layers,
            "q_lora_rank": None,
            "kv_lora_rank": _LORA,
            "qk_nope_head_dim": _NOPE,
            "qk_rope_head_dim": _ROPE,
            "v_head_dim": _VALUE,
        }
    if quantization := _quantization(w):
        config["quantization_config"] = quantization
    return config


_KIND_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "norm_topk_prob": False},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
    "deepseek2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "deepseek4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
}


def _quantization(w: _Writer) -> dict[str, Any] | None:
    """quantization_config for experts only; everything else stays bf16."""
    others = sorted(
        name.removesuffix(".weight")
        for name, tensor in w.tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2 and ".experts." not in name and "embed" not in name
    )
    if w.format == "fp8_block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(w.block),
            "modules_to_not_convert": others,
        }
    if w.format == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": others}
    if w.format == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": others}
    return None
