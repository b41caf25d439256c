"""Any sequence of batches through any tiers gives what the all-resident layer gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_moe import EXPERTS, HIDDEN, LAYERS, TOP_K, FakePacks, bits_equal, tiers
from ziggurat.residency.passes import PassPath, StepTokens
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.usefixtures("layers")


@dataclass
class Batch:
    """ids: [layers][live + padding][k]."""

    ids: list[list[list[int]]]
    live: int
    prefill: list[bool]
    eager: bool
    seed: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    live, padding = draw(st.integers(0, 5)), draw(st.integers(0, 2))
    token = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K)
    layer = st.lists(token, min_size=live + padding, max_size=live + padding)
    return Batch(
        draw(st.lists(layer, min_size=1, max_size=LAYERS)),
        live,
        draw(st.lists(st.booleans(), min_size=live, max_size=live)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )


def all_layers(
    service: ExpertService, x: torch.Tensor, weights: torch.Tensor, ids: list[torch.Tensor], path: PassPath
) -> list[torch.Tensor]:
    """A forward pass whose layers all see the same tokens."""
    return [service.moe(layer, x, weights, chosen) for layer, chosen in enumerate(ids)]


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 16) | st.just(48),
    places=st.none() | st.integers(1, 12),
    eviction=st.sampled_from(["lru", "lfu-decay"]),
    mode=st.sampled_from(["inline", "replay"]),
    replays=st.integers(0, 3),
    slot_seed=st.none() | st.integers(0, 5),
    steps=st.lists(batches(), max_size=5),
)
def test_random_routing(
    packs: FakePacks,
    slots: int,
    places: int | None,
    eviction: str,
    mode: str,
    replays: int,
    slot_seed: int | None,
    steps: list[Batch],
) -> None:
    resident = packs.resident()
    miss = {"mode": mode, "max_replays": replays}
    with tiers(
        packs, slots=slots, places=places, eviction=eviction, miss=miss, slot_seed=slot_seed
    ) as service:
        for batch in steps:
            generator = torch.Generator().manual_seed(batch.seed)
            rows = len(batch.ids[0])
            x = torch.randn(rows, HIDDEN, generator=generator)
            weights = torch.rand(rows, TOP_K, generator=generator)
            ids = [torch.tensor(layer, dtype=torch.int64).reshape(rows, TOP_K) for layer in batch.ids]
            resident_before = {layer: service.slots.table.numpy[layer].copy() for layer in range(LAYERS)}
            prefill = np.array(batch.prefill, dtype=np.bool_)
            tokens = StepTokens(batch.live, prefill, eager=batch.eager)
            result = service.run_step(partial(all_layers, service, x, weights, ids), tokens)
            assert result.outcome in ("clean", "replayed", "exact")
            for layer, (y, chosen) in enumerate(zip(result.value, ids, strict=True)):
                live = slice(0, batch.live)
                if batch.live:
                    assert bits_equal(y[live], resident(layer, x[live], weights[live], chosen[live]))
                assert (y[batch.live :] == 0).all()
            if mode == "replay" and not batch.eager:
                missing = sum(
                    int((resident_before[layer][chosen[: batch.live].numpy()] < 0).sum())
                    for layer, chosen in enumerate(ids)
                )
                assert result.misses_first_pass == missing
            service.slots.check()
            service.cache.check()
