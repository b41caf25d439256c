"""Layers that fetch their own rows give the bits of the all-resident model, whatever pool and arena hold."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from support.admissions import admission_of
from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, tiers
from ziggurat.residency.passes import StepTokens

ROWS = 48
POOLS = {"100%": 48, "50%": 24, "25%": 12, "19%": 9, "top_k": 3, "one": 1}
ARENAS = {"whole": 48, "whole and staging": 50, "half": 24, "few": 5}


@functools.cache
def reference(packs: FakePacks, tokens: int, seed: int) -> torch.Tensor:
    model = FakeModel.make()
    return packs.reference(model, model.inputs(tokens, seed=seed))


@pytest.mark.parametrize("places", ARENAS.values(), ids=ARENAS)
@pytest.mark.parametrize("slots", POOLS.values(), ids=POOLS)
def test_any_pool_and_arena(packs: FakePacks, model: FakeModel, slots: int, places: int) -> None:
    with tiers(
        packs, slots=slots, places=places, inline=True, slot_seed=7, miss={"mode": "inline"}
    ) as service:
        assert service.choice.serving == "inline"
        run = Passes(model, service)
        for step, tokens in enumerate((1, 4, 1, 96, 4, 1)):
            result = run.step(model.inputs(tokens, seed=step), padding=3)
            expected = reference(packs, tokens, step)
            assert bits_equal(result.value, expected), (step, result.outcome)
            assert not result.failures
            service.collect()
            service.slots.check()
            with service.paused():
                service.cache.check()


def test_an_arena_with_every_row_is_never_waited_for(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=12, places=ROWS, inline=True) as service:
        start = service.warm_start()
        assert (start.pool_rows, start.arena_rows) == (12, ROWS)
        service.preheated()
        assert service.cache.used == ROWS
        run = Passes(model, service)
        for step in range(20):
            x = model.inputs(1 + step % 4, seed=step)
            result = run.step(x)
            assert bits_equal(result.value, packs.reference(model, x))
            assert (result.outcome, result.passes) == ("inline", 1)
        service.collect()
        value = service.metrics.value
        assert value("ziggurat_replay_passes_total") == 0
        assert value("ziggurat_arena_misses_total") == 0
        assert value("ziggurat_steps_total", "inline") + value("ziggurat_steps_total", "clean") == 20
        assert value("ziggurat_inline_rows_total") > 0
        service.slots.check()


def test_prompts_touch_no_slot(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=12, places=ROWS, inline=True) as service:
        service.warm_start()
        service.preheated()
        run = Passes(model, service)
        run.step(model.inputs(2))
        service.collect()
        before = service.slots.table.numpy.copy()
        x = model.inputs(96, seed=3)
        result = run.step(x, StepTokens(96, np.arange(96) < 94))
        assert result.outcome == "streamed"
        assert bits_equal(result.value, packs.reference(model, x))
        assert (service.slots.table.numpy == before).all()
        assert service.slots.used == 12


def test_the_mirror_is_what_the_device_has(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=12, places=24, inline=True) as service:
        run = Passes(model, service)
        for step in range(30):
            run.step(model.inputs(2, seed=step))
        admission = admission_of(service)
        assert torch.equal(admission.table, service.slots.table.table)
        assert admission.owners.tolist() == service.slots.table.owners
