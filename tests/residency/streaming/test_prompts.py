"""Prompts of a service with staging memory: they pass by what decoding keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.fake_moe import (
    EXPERTS,
    LAYERS,
    TOP_K,
    FakeModel,
    FakePacks,
    Passes,
    bits_equal,
    open_tiers,
    tiers,
)
from support.lazy_device import Device, LazyPool, Name
from support.streams import lazy_kernels
from support.wrapped_packs import WrappedPack
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.service import ExpertService
from ziggurat.residency.streaming.ring import StagingRing

MODES: dict[str, dict[str, Any]] = {
    "inline": {"mode": "inline"},
    "replay": {"mode": "replay", "max_replays": 3},
    "exact": {"mode": "replay", "max_replays": 0},
}


def prompt(tokens: int, decoding: int = 0) -> StepTokens:
    """A step of `tokens` tokens, of which the first `decoding` belong to no prompt."""
    return StepTokens(tokens, np.arange(tokens) >= decoding, eager=True)


def held(service: ExpertService) -> set[int]:
    return set(service.slots.held())


def staged(service: ExpertService) -> float:
    name = "ziggurat_fetched_rows_total"
    return sum(service.metrics.value(name, source, "staging") for source in ("arena", "pack"))


@pytest.mark.parametrize("early", ["copies", "kernels"])
@pytest.mark.parametrize("places", [3, 60])
@pytest.mark.parametrize("slots", [1, 24])
@pytest.mark.parametrize("mode", MODES)
def test_prompts_and_decoding_in_turn_give_the_bits_of_the_resident_model(
    packs: FakePacks, model: FakeModel, mode: str, slots: int, places: int, early: Name
) -> None:
    device = Device(early)
    stride = packs.open().header.stride
    service = open_tiers(
        packs,
        slots=slots,
        places=places,
        miss=MODES[mode],
        on_device=True,
        pool=LazyPool(device, slots, stride),
        ring=StagingRing([LazyPool(device, 3, stride) for _ in range(2)]),
        kernels=lazy_kernels(packs, device, part_tokens=20),
    )
    run = Passes(model, service)
    for step, tokens in enumerate((2, 30, 1, 5, 48, 3)):
        x = model.inputs(tokens, seed=step)
        result = run.step(x, prompt(tokens, decoding=step) if tokens > 3 else None, padding=step % 2)
        assert bits_equal(result.value, packs.reference(model, x))
        service.slots.check()
        service.cache.check()
    service.close()


@pytest.mark.parametrize("decoding", [0, 3])
@pytest.mark.parametrize("eviction", ["lru", "lfu-decay"])
def test_a_long_prompt_changes_no_slot_of_a_full_pool(
    packs: FakePacks, model: FakeModel, decoding: int, eviction: str
) -> None:
    with tiers(packs, slots=9, on_device=True, eviction=eviction, miss=MODES["replay"]) as service:
        run = Passes(model, service)
        for step in range(6):
            run.step(model.inputs(1, seed=step))
        assert not service.slots.free
        table = service.slots.table.numpy.copy()
        x = model.inputs(40)
        result = run.step(x, prompt(40, decoding))
        assert bits_equal(result.value, packs.reference(model, x))
        assert np.array_equal(service.slots.table.numpy, table)
        assert staged(service) == LAYERS * EXPERTS - 9
        assert service.metrics.value("ziggurat_routed_pairs_total") == (6 + 40) * LAYERS * TOP_K
        assert result.misses_first_pass > 0


def test_a_large_batch_that_decodes_gets_slots(packs: FakePacks, model: FakeModel) -> None:
    """Otherwise a service that serves every step this way would keep for good what it had first."""
    with tiers(packs, slots=9, on_device=True, miss=MODES["inline"]) as service:
        run = Passes(model, service)
        for step in range(3):
            run.step(model.inputs(40, seed=step))
            assert service.slots.evictions > 0
        assert staged(service) == 0


def test_a_long_prompt_fills_free_slots_and_evicts_nothing(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=40, on_device=True, miss=MODES["replay"]) as service:
        run = Passes(model, service)
        run.step(model.inputs(1))
        kept = held(service)
        run.step(model.inputs(40), prompt(40))
        assert kept < held(service)
        assert not service.slots.free
        assert service.slots.evictions == 0


def test_of_a_short_mixed_step_only_what_decoding_wants_gets_a_slot(
    packs: FakePacks, model: FakeModel
) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=LAYERS * TOP_K, on_device=True, miss=MODES["replay"], pack=pack) as service:
        run = Passes(model, service)
        run.step(model.inputs(1, seed=1))
        before = held(service)
        x = model.inputs(2, seed=2)  # two tokens, the second one of a prompt
        assert bits_equal(run.step(x, prompt(2, 1)).value, packs.reference(model, x))
        decoded: set[int] = set()
        packs_moe = packs.whole()

        def moe(layer: int, *call: Any) -> Any:
            decoded.update((layer * EXPERTS + call[2][0]).tolist())
            return packs_moe(layer, *call)

        model.forward(x, moe)
        assert held(service) - before <= decoded <= held(service)
        assert staged(service) > 0


@pytest.mark.parametrize("tokens", [40, 8])  # blind, and not
def test_a_row_that_is_lost_to_a_prompt_fails_its_tokens_only(
    packs: FakePacks, model: FakeModel, tokens: int
) -> None:
    x = model.inputs(tokens)
    last: list[set[int]] = [set() for _ in range(tokens)]
    resident = packs.whole()

    def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if layer == LAYERS - 1:
            last[:] = [set(chosen) for chosen in ids.tolist()]
        return resident(layer, h, weights, ids)

    wanted = model.forward(x, moe)
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=5, places=None, on_device=True, miss=MODES["replay"], pack=pack) as service:
        run = Passes(model, service)
        for step in range(6):
            run.step(model.inputs(1, seed=step))
        lost = min(set.union(*last) - {key % EXPERTS for key in held(service)})
        pack.failing[(LAYERS - 1) * EXPERTS + lost] = "io"
        result = run.step(x, prompt(tokens))
        assert result.outcome == "failed"
        assert [(one.layer_id, one.expert) for one in result.failures] == [(LAYERS - 1, lost)]
        assert result.failed_tokens is not None
        assert result.failed_tokens.tolist() == [lost in chosen for chosen in last]
        kept = ~result.failed_tokens
        assert 0 < kept.sum() < tokens
        assert bits_equal(result.value[kept], wanted[kept])
        pack.failing.clear()
        assert bits_equal(run.step(x, prompt(tokens)).value, wanted)
