"""Guesses by a model's own routers, over plain modules with the names that vLLM's models have."""

from __future__ import annotations

import pytest
import torch

from ziggurat.integration.vllm.errors import UnsupportedFeatureError
from ziggurat.integration.vllm.lookahead import RouterGuesses

LAYERS, HIDDEN, EXPERTS = 3, 32, 16


class Norm(torch.nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN, generator=generator) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), self.weight)


class Gate(torch.nn.Module):
    def __init__(self, generator: torch.Generator, *, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))
        self.e_score_correction_bias = (
            torch.nn.Parameter(torch.randn(EXPERTS, generator=generator)) if bias else None
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Block(torch.nn.Module):
    def __init__(self, generator: torch.Generator, *, bias: bool) -> None:
        super().__init__()
        self.gate = Gate(generator, bias=bias)
        self.experts = torch.nn.Module()


class Layer(torch.nn.Module):
    def __init__(self, generator: torch.Generator, *, bias: bool) -> None:
        super().__init__()
        self.post_attention_layernorm = Norm(generator)
        self.mlp = Block(generator, bias=bias)

    def scores(self, residual: torch.Tensor) -> torch.Tensor:
        logits, _ = self.mlp.gate.forward(self.post_attention_layernorm.forward(residual))
        bias = self.mlp.gate.e_score_correction_bias
        return logits if bias is None else torch.sigmoid(logits) + bias


def made(*, bias: bool = False) -> tuple[torch.nn.Module, list[Layer], list[str]]:
    """A model, its layers, and what vLLM calls their experts."""
    generator = torch.Generator().manual_seed(3)
    layers = [Layer(generator, bias=bias) for _ in range(LAYERS)]
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(layers)
    return model, layers, [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_guess_is_the_next_router_over_this_layers_residual_stream(bias: bool) -> None:
    model, layers, prefixes = made(bias=bias)
    guesses = RouterGuesses(model, prefixes, 4, lambda device: True)
    residual = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for layer in range(1, LAYERS):
            guess = guesses(layer)
            assert guess is not None
            found = guess(layers[layer - 1].post_attention_layernorm.forward(residual))
            assert torch.equal(found, layers[layer].scores(residual).topk(4, dim=-1).indices)


def test_a_channel_that_the_norm_before_has_shut_is_left_out() -> None:
    model, layers, prefixes = made()
    layers[0].post_attention_layernorm.weight.data[3] = 0.0
    guess = RouterGuesses(model, prefixes, EXPERTS, lambda device: True)(1)
    assert guess is not None
    with torch.no_grad():
        found = guess(torch.full((1, HIDDEN), 2.0))
    assert sorted(found[0].tolist()) == list(range(EXPERTS))


def test_nobody_guesses_while_a_branch_could_not_be_joined() -> None:
    model, _, prefixes = made()
    assert RouterGuesses(model, prefixes, 4, lambda device: False)(1) is None


@pytest.mark.parametrize("missing", ["mlp.gate", "post_attention_layernorm"])
def test_a_model_without_routers_or_norms_in_their_places_is_refused(missing: str) -> None:
    model, _, prefixes = made()
    owner, _, name = f"model.layers.1.{missing}".rpartition(".")
    delattr(model.get_submodule(owner), name)
    message = rf"miss\.lookahead: nothing called '{name}' is near model\.layers\.1\.mlp\.experts"
    with pytest.raises(UnsupportedFeatureError, match=message):
        RouterGuesses(model, prefixes, 4, lambda device: True)
