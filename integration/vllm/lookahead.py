"""Guesses of the next layer's experts in vLLM: its router is asked about what goes into the layer before.

What goes into a layer's experts is the residual stream behind attention, normalised and scaled by the layer's own norm.
Scaled by the next layer's norm instead, it is what that layer would see if this one changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ziggurat.integration.vllm.errors import UnsupportedFeatureError
from ziggurat.kernels.lookahead import Guess

_NORM = "post_attention_layernorm"


class RouterGuesses:
    """Guesses by the routers of a model; a GuessOf.

    prefixes: vLLM's names of the MoE layers' experts, in order. width: guesses of a token. allowed: whether work on a
    device may be forked off now. Raises UnsupportedFeatureError if a layer's router or norm is not where Qwen3-MoE,
    OLMoE, Mixtral and DeepSeek models have theirs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        prefixes: Sequence[str],
        width: int,
        allowed: Callable[[torch.device], bool],
    ) -> None:
        modules = dict(model.named_modules())
        self._gates = [_above(modules, prefix, "gate") for prefix in prefixes]
        norms = [_above(modules, prefix, _NORM).weight.data.float() for prefix in prefixes]
        self._width = width
        self._allowed = allowed
        # A channel that a norm has shut says nothing, whatever it is multiplied by.
        ratios = [torch.where(a == 0, 0.0, b / a) for a, b in pairwise(norms)]
        self._scales = [None, *ratios]

    def __call__(self, layer: int) -> Guess | None:
        """Of layer number `layer`, which has one before it."""
        gate, scale = self._gates[layer], self._scales[layer]
        assert scale is not None
        if not self._allowed(scale.device):
            return None
        width = self._width

        def guess(x: torch.Tensor) -> torch.Tensor:
            scores = gate((x * scale).to(x.dtype))
            if isinstance(scores, tuple):  # vLLM's linear layers answer with a bias beside
                scores = scores[0]
            bias = getattr(gate, "e_score_correction_bias", None)
            if bias is not None:  # chosen by sigmoid and bias; softmax keeps the order of what it is given
                scores = torch.sigmoid(scores.float()) + bias
            return scores.topk(width, dim=-1).indices

        return guess


def whole_graph(device: torch.device) -> bool:
    """Whether a branch may leave this layer and join the next: in eager code, and in a graph of the whole model. One
    that ends between two layers would be left with an open end."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return True
    return bool(get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL)


def _above(modules: dict[str, Any], prefix: str, name: str) -> Any:
    """The module `name` beside one of those that the module `prefix` is in, the nearest one."""
    place = prefix
    while "." in place:
        place = place.rpartition(".")[0]
        found = modules.get(f"{place}.{name}")
        if hasattr(found, "weight"):
            return found
    raise UnsupportedFeatureError(
        f"miss.lookahead: nothing called {name!r} is near {prefix}, so its experts cannot be guessed; set it to 0"
    )
