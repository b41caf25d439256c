"""Tiers of any size, in every miss mode, give the bits of the all-resident model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from support.fake_moe import TOP_K, FakeModel, FakePacks, Passes, bits_equal, open_tiers, tiers
from support.ranks import DivergedError, ThreadConsensus, run_ranks
from ziggurat.residency.passes import StepResult, StepTokens

pytestmark = pytest.mark.usefixtures("layers")

POOLS = {"100%": 48, "50%": 24, "25%": 12, "top_k+1": TOP_K + 1, "one": 1}
MODES: dict[str, dict[str, Any]] = {
    "inline": {"mode": "inline"},
    "replay1": {"mode": "replay", "max_replays": 1},
    "replay2": {"mode": "replay", "max_replays": 2},
    "replay3": {"mode": "replay", "max_replays": 3},
    "exact": {"mode": "replay", "max_replays": 0},
}
BATCHES = {"one": 1, "four": 4, "prompt": 96}
STEPS = 3


@functools.cache
def reference(packs: FakePacks, tokens: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = FakeModel.make(dtype=dtype)
    return packs.reference(model, model.inputs(tokens, seed=step))


@pytest.mark.parametrize("tokens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", POOLS.values(), ids=POOLS)
def test_one_rank(packs: FakePacks, model: FakeModel, slots: int, mode: str, tokens: int) -> None:
    for seed, padding in ((None, 0), (7, 3)):
        with tiers(packs, slots=slots, miss=MODES[mode], slot_seed=seed) as service:
            run = Passes(model, service)
            for step in range(STEPS):
                result = run.step(model.inputs(tokens, seed=step), padding=padding)
                assert bits_equal(result.value, reference(packs, tokens, step))
                assert result.outcome in ("clean", "replayed", "exact")
                assert not result.failures
                service.slots.check()
                service.cache.check()


@pytest.mark.parametrize("tokens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pools", [(48, 4), (12, 24), (1, 12), (4, 1), (24, 24)], ids=str)
def test_two_ranks_with_unequal_pools(
    packs_tp2: FakePacks, model: FakeModel, pools: tuple[int, int], mode: str, tokens: int
) -> None:
    def work(consensus: ThreadConsensus) -> list[StepResult[torch.Tensor]]:
        rank = consensus.rank
        service = open_tiers(
            packs_tp2,
            slots=pools[rank],
            rank=rank,
            consensus=consensus,
            miss=MODES[mode],
            slot_seed=rank,
            places=(16, None)[rank],
        )
        run = Passes(model, service, consensus.all_reduce)
        results = [run.step(model.inputs(tokens, seed=step)) for step in range(STEPS)]
        service.close()
        return results

    first, second = run_ranks(2, work).all()
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert bits_equal(one.value, reference(packs_tp2, tokens, step))
        assert bits_equal(other.value, one.value)
        assert (one.passes, one.outcome) == (other.passes, other.outcome)


@pytest.mark.parametrize("slots", [24, 5])
@pytest.mark.parametrize("mode", ["inline", "replay2"])
def test_sixteen_bit_activations_and_two_bit_rows(packs_w2: FakePacks, slots: int, mode: str) -> None:
    model = FakeModel.make(dtype=torch.bfloat16)
    with tiers(packs_w2, slots=slots, miss=MODES[mode]) as service:
        run = Passes(model, service)
        for step in range(STEPS):
            result = run.step(model.inputs(4, seed=step))
            assert bits_equal(result.value, reference(packs_w2, 4, step, torch.bfloat16))


@pytest.mark.parametrize("eviction", ["lru", "lfu-decay"])
@pytest.mark.parametrize("places", [None, 1, 5, 48])
def test_any_arena_and_policy(packs: FakePacks, model: FakeModel, places: int | None, eviction: str) -> None:
    with tiers(packs, slots=12, places=places, eviction=eviction, miss=MODES["replay2"]) as service:
        run = Passes(model, service)
        for step in range(STEPS):
            result = run.step(model.inputs(4, seed=step))
            assert bits_equal(result.value, reference(packs, 4, step))
            service.cache.check()


@pytest.mark.parametrize("mode", ["inline", "replay2"])
def test_a_token_does_not_see_its_batch(packs: FakePacks, model: FakeModel, mode: str) -> None:
    x = model.inputs(8)
    with tiers(packs, slots=6, miss=MODES[mode]) as service:
        run = Passes(model, service)
        together = run.step(x).value
        alone = torch.cat([run.step(x[i : i + 1]).value for i in range(8)])
        order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
        shuffled = run.step(x[order]).value
    assert bits_equal(together, alone)
    assert bits_equal(together[order], shuffled)


@pytest.mark.parametrize("mode", ["inline", "replay2"])
def test_prefill_and_decode_tokens_in_one_step(packs: FakePacks, model: FakeModel, mode: str) -> None:
    x = model.inputs(20)
    prefill = torch.arange(20).numpy() < 16
    with tiers(packs, slots=7, miss=MODES[mode]) as service:
        result = Passes(model, service).step(x, StepTokens(20, prefill))
    assert bits_equal(result.value, packs.reference(model, x))


# -- the tests above can fail --------------------------------------------------------------------------------------


def test_without_replay_results_differ(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=12, miss=MODES["replay2"], replay_enabled=False) as service:
        result = Passes(model, service).step(model.inputs(4, seed=0))
    assert result.outcome == "tolerated"
    difference = (result.value - reference(packs, 4, 0)).abs().max()
    assert difference > 1.0, "experts of this model must matter"
    assert torch.isfinite(result.value).all(), "a missing expert contributes zero, not pool garbage"


def test_without_consensus_ranks_diverge(packs_tp2: FakePacks, model: FakeModel) -> None:
    def work(consensus: ThreadConsensus) -> None:
        service = open_tiers(
            packs_tp2,
            slots=(48, 12)[consensus.rank],
            rank=consensus.rank,
            consensus=consensus,
            miss=MODES["replay3"],
            consensus_enabled=False,
        )
        run = Passes(model, service, consensus.all_reduce)
        for step in range(8):
            run.step(model.inputs(4, seed=step % 2))

    with pytest.raises(DivergedError):
        run_ranks(2, work).all()


def test_the_pool_really_is_poisoned(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=48) as service:
        for key in range(48):
            service.slots.publish(service.slots.take(1, ())[0], key, 1.0)  # published, but never written
        assert torch.isnan(Passes(model, service).step(model.inputs(4)).value).all()
