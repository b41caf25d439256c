"""What every implementation of LayerKernels promises of layers that admit their own experts."""

from __future__ import annotations

import pytest
import torch

from support.admissions import differences, random_calls
from support.admitted_layers import Admitted
from support.layer_kernels import KINDS
from support.layers import same_bits

#: hidden, intermediate, experts, top_k.
SMALL = (96, 160, 8, 3)
#: Many experts, few tokens for each: large lists of work for the GEMMs of few pairs.
FINE = (64, 32, 128, 4)


def check(given: Admitted, tokens: int, passes: int, seed: int = 0) -> int:
    """State, pool and result of every call; returns how many rows were copied."""
    copied = 0
    layers, experts = given.twin.layers, given.twin.experts
    tallies = [torch.zeros(3, dtype=torch.int32, device=given.device) for _ in range(2)]
    lacking = 0
    for number, one in enumerate(random_calls(layers, experts, given.top_k, tokens, passes, seed)):
        x, weights = given.inputs(tokens, number)
        flags = None if one.prefill is None else one.prefill.to(given.device)
        ids, live = one.ids.to(given.device), one.live.to(given.device)
        chosen = one.ids[: int(one.live)].flatten()
        chosen = chosen[(chosen >= 0) & (chosen < experts)].long()
        lacking += int((given.twin.table[one.layer][chosen] < 0).sum())
        out = given.launch(x, weights, ids, live, flags, one.layer, tallies[0])
        given.follow(one)
        assert differences(given.twin, given.ours) == [], (number, one.layer)
        expected = given.expected(x, weights, one, tallies[1])
        assert same_bits(out.cpu(), expected.cpu()), (number, one.layer)
        assert tallies[0].tolist() == [*tallies[1][:2].tolist(), lacking]
        copied += int(given.twin.state[3])
    return copied


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("codec", "dtype"), [("w2", torch.bfloat16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(
    ("sizes", "tokens", "slots"),
    [
        (SMALL, 1, 3),
        (SMALL, 1, 11),
        (SMALL, 5, 8),
        (SMALL, 20, 20),
        (SMALL, 5, 4),
        (SMALL, 30, 8),
        (FINE, 1, 4),
        (FINE, 20, 80),
        (FINE, 70, 140),
        (FINE, 260, 128),
    ],
)
def test_every_call_leaves_the_twins_state_and_gives_the_bits_of_a_full_pool(
    kind: str, codec: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], tokens: int, slots: int
) -> None:
    """One token; small lists, large lists for few pairs an expert and for many; pools from one layer's set upward, and
    smaller ones, which leave experts out as rows do that are not in the arena."""
    absent = range(5, 2 * sizes[2], 13)
    given = Admitted.make(kind, codec, dtype, sizes, layers=2, slots=slots, max_tokens=tokens, absent=absent)
    assert check(given, tokens, 6 if tokens < 100 else 3) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_live_tokens_is_none(kind: str) -> None:
    given = Admitted.make(kind, "w2", torch.bfloat16, SMALL, layers=1, slots=6, max_tokens=4)
    one, *_ = random_calls(1, SMALL[2], SMALL[3], 4, 1, seed=1)
    x, weights = given.inputs(4, 0)
    for tokens in (4, 1):
        before = given.ours.table.clone()
        live = torch.zeros(1, dtype=torch.int32, device=given.device)
        ids = one.ids[:tokens].to(given.device)
        out = given.launch(x[:tokens], weights[:tokens], ids, live, None, 0)
        assert same_bits(out, torch.zeros_like(out))
        assert torch.equal(given.ours.table, before)
        assert given.ours.state.tolist()[0] == 0
    assert check(given, 4, 2) > 0
