"""Checkpoints for measuring: random experts of a real size, and a bfloat16 copy of an FP8 demo model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_experts(
    folder: Path,
    source: str,
    layers: int,
    experts: int,
    seed: int = 0,
    *,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    distinct: int | None = None,
) -> int:
    """A checkpoint that holds experts only; returns their bytes, scales included.

    source: "bf16", or "fp8_block" (e4m3 and one float32 scale per 128 x 128 block). Experts have the size of
    Qwen3-30B-A3B's unless told: hidden 2048, intermediate 768. A file a layer. distinct: so many experts differ, the
    others repeat them (random numbers take longer than everything else).
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    made = [list(_expert(source, hidden, intermediate, generator)) for _ in range(distinct or 0)]
    weight_map = {}
    total = 0
    for layer in range(layers):
        tensors = {}
        for expert in range(experts):
            new = (
                made[(layer * experts + expert) % len(made)]
                if made
                else _expert(source, hidden, intermediate, generator)
            )
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            tensors.update({prefix + name: tensor.clone() if made else tensor for name, tensor in new})
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": TOP_K,
    }
    if source == "fp8_block":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return total


def _expert(
    source: str, hidden: int, intermediate: int, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, rows, columns in (
        ("gate_proj.weight", intermediate, hidden),
        ("up_proj.weight", intermediate, hidden),
        ("down_proj.weight", hidden, intermediate),
    ):
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        if source == "bf16":
            yield name, weight.to(torch.bfloat16)
            continue
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scale[:, None, :, None]).view(rows, columns)
        yield name, codes.to(torch.float8_e4m3fn)
        yield name + SCALE_SUFFIX, scale


def write_bf16_copy(source: Path, folder: Path) -> None:
    """``source`` with its FP8 block weights as bfloat16, which engines without FP8 kernels can serve."""
    folder.mkdir(parents=True)
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        tensors = {
            name: _dequantized(file.get_tensor(name), file.get_tensor(name + SCALE_SUFFIX))
            if name + SCALE_SUFFIX in names
            else file.get_tensor(name)
            for name in sorted(names)
            if not name.endswith(SCALE_SUFFIX)
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in _TOKENIZER:
        shutil.copyfile(source / name, folder / name)


def _dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.float() * wide).to(torch.bfloat16)
