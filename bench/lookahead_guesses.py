"""Reads text with a Qwen3-MoE model and asks each layer's router about hidden states of the layer before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lookahead_model import IdArray, Moment

_BATCH = 8


def routed_and_guessed(
    folder: Path, windows: Sequence[Sequence[int]]
) -> tuple[IdArray, dict[Moment, IdArray]]:
    """Routing of every token, [windows, positions, layers, k], and by moment the experts of each layer as ranked from
    a hidden state of the layer before, [.., layers, experts]. Layer 0 has none before it: its guesses mean nothing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    layers = list(model.model.layers)
    seen: dict[tuple[Moment, int], torch.Tensor] = {}
    hooks = []
    for number, layer in enumerate(layers):
        # What goes into the norm before the experts is the residual stream behind attention.
        norm = layer.post_attention_layernorm
        hooks.append(norm.register_forward_pre_hook(_keep_input(seen, Moment.MOE_INPUT, number)))
        hooks.append(layer.register_forward_hook(_keep_output(seen, Moment.LAYER_OUTPUT, number)))
    top_k = model.config.num_experts_per_tok
    routed: list[IdArray] = []
    ranked: dict[Moment, list[IdArray]] = {moment: [] for moment in Moment}
    with torch.inference_mode():
        for first in range(0, len(windows), _BATCH):
            model(torch.tensor(windows[first : first + _BATCH]))
            truth = [_rank(layer, seen[Moment.MOE_INPUT, number]) for number, layer in enumerate(layers)]
            # From here on no forward may run: a norm that is asked again would overwrite what was seen.
            routed.append(torch.stack(truth, dim=2)[..., :top_k].numpy())
            for moment in Moment:
                guesses = [
                    _rank(layer, seen[moment, max(0, number - 1)]) for number, layer in enumerate(layers)
                ]
                ranked[moment].append(torch.stack(guesses, dim=2).numpy())
    for hook in hooks:
        hook.remove()
    return np.concatenate(routed), {moment: np.concatenate(parts) for moment, parts in ranked.items()}


def _rank(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Experts of a layer, the router's favourites first, for hidden states of the residual stream [B, T, H]."""
    norm = layer.post_attention_layernorm
    logits = torch.nn.functional.linear(norm.forward(hidden), layer.mlp.gate.weight)
    return logits.argsort(dim=-1, descending=True, stable=True)


def _keep_input(seen: dict[tuple[Moment, int], torch.Tensor], moment: Moment, number: int) -> Any:
    def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        seen[moment, number] = given[0]

    return hook


def _keep_output(seen: dict[tuple[Moment, int], torch.Tensor], moment: Moment, number: int) -> Any:
    def hook(module: torch.nn.Module, given: tuple[Any, ...], result: Any) -> None:
        seen[moment, number] = result[0] if isinstance(result, tuple) else result

    return hook
