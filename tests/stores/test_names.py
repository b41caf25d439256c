"""Which tensor names are expert tensors."""

from __future__ import annotations

import pytest

from ziggurat.stores.names import ExpertName, parse_expert_name, style_of


@pytest.mark.parametrize(
    ("name", "layer", "expert", "matrix", "kind"),
    [
        ("model.layers.0.mlp.experts.0.gate_proj.weight", 0, 0, "w1", "weight"),
        ("model.layers.11.mlp.experts.127.up_proj.weight", 11, 127, "w3", "weight"),
        ("model.layers.3.mlp.experts.5.down_proj.weight_scale_inv", 3, 5, "w2", "scale"),
        ("model.layers.3.mlp.experts.5.down_proj.weight_scale", 3, 5, "w2", "scale"),
        ("model.layers.3.mlp.experts.5.down_proj.weight_scale_2", 3, 5, "w2", "scale_2"),
        ("model.layers.3.mlp.experts.5.down_proj.input_scale", 3, 5, "w2", "ignored"),
        ("model.layers.3.block_sparse_moe.experts.5.w1.weight", 3, 5, "w1", "weight"),
        ("model.layers.3.block_sparse_moe.experts.5.w2.weight", 3, 5, "w2", "weight"),
        ("model.layers.3.block_sparse_moe.experts.5.w3.weight", 3, 5, "w3", "weight"),
        ("layers.42.ffn.experts.255.w3.weight", 42, 255, "w3", "weight"),
        ("layers.42.ffn.experts.255.w3.scale", 42, 255, "w3", "scale"),
        ("model.language_model.layers.1.mlp.experts.2.up_proj.weight", 1, 2, "w3", "weight"),
        ("language_model.model.layers.1.mlp.experts.2.up_proj.weight", 1, 2, "w3", "weight"),
        ("model.layers.1.mlp.experts.gate_up_proj", 1, None, "w13", "weight"),
        ("model.layers.1.mlp.experts.gate_up_proj.weight", 1, None, "w13", "weight"),
        ("model.layers.1.mlp.experts.down_proj", 1, None, "w2", "weight"),
        ("model.layers.1.mlp.experts.down_proj_scale_inv", 1, None, "w2", "scale"),
        ("model.layers.1.mlp.experts.gate_up_proj.weight_scale_inv", 1, None, "w13", "scale"),
        ("model.layers.1.mlp.experts.gate_up_proj_bias", 1, None, "w13", "unknown"),
        ("model.layers.1.mlp.experts.gate_up_proj_blocks", 1, None, "w13", "unknown"),
        ("model.layers.1.mlp.experts.3.up_proj.bias", 1, 3, "w3", "unknown"),
        ("model.layers.1.mlp.experts.3.up_proj.qweight", 1, 3, "w3", "unknown"),
        ("model.layers.1.mlp.experts.3.gate_up_proj.weight", 1, 3, "w13", "unknown"),
        ("model.layers.1.mlp.experts.3.linear_v.weight", 1, 3, "w1", "unknown"),
        ("model.layers.1.mlp.experts.w13_stacked", 1, None, "w13", "unknown"),
    ],
)
def test_expert_names(name: str, layer: int, expert: int | None, matrix: str, kind: str) -> None:
    assert parse_expert_name(name) == ExpertName(name, layer, expert, matrix, kind)  # type: ignore[arg-type]  # literals from the table


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "mtp.0.ffn.experts.3.w1.weight",
        "mtp.layers.0.mlp.experts.3.up_proj.weight",
        "visual.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.99999999999.mlp.experts.3.up_proj.weight",
        "model.layers.-1.mlp.experts.3.up_proj.weight",
        "experts.3.up_proj.weight",
        "lm_head.weight",
    ],
)
def test_other_names(name: str) -> None:
    assert parse_expert_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.7.mlp.experts.3.gate_proj.weight",
        "model.layers.7.block_sparse_moe.experts.3.w1.weight",
        "layers.7.ffn.experts.3.w1.weight",
    ],
)
def test_style_spells_the_same_name(name: str) -> None:
    assert style_of(name).weight(7, 3, "w1") == name


def test_style_of_fused_names() -> None:
    style = style_of("model.layers.7.mlp.experts.gate_up_proj")
    assert style.weight(8, None, "w13") == "model.layers.8.mlp.experts.gate_up_proj"
    assert style.weight(8, None, "w2") == "model.layers.8.mlp.experts.down_proj"
