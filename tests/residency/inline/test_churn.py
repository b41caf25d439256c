"""Rows come and go in the arena while steps run that read it: the bits stay those of the all-resident model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest
import torch

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, tiers
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.churn import ArenaChurn
from ziggurat.residency.runtime_errors import StepError

STEPS = 400
DIFFERENT = 40  # steps that repeat, so that references are computed once


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Two threads that take turns often: more of what can go wrong, and no waiting for the lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@functools.cache
def reference(packs: FakePacks, seed: int) -> torch.Tensor:
    model = FakeModel.make()
    return packs.reference(model, model.inputs(1 + seed % 3, seed=seed))


def run(packs: FakePacks, model: FakeModel, slots: int, places: int, steps: int) -> ArenaChurn:
    """Steps beside a churning thread, compared with the resident model; the thread's counts."""
    with tiers(packs, slots=slots, places=places, inline=True, miss={"mode": "inline"}) as service:
        service.warm_start()
        service.preheated()
        run = Passes(model, service)
        outcomes = set()
        with service.churn(seed=3) as churn:
            for step in range(steps):
                seed = step % DIFFERENT
                result = run.step(model.inputs(1 + seed % 3, seed=seed))
                outcomes.add(result.outcome)
                assert bits_equal(result.value, reference(packs, seed)), (step, result.outcome)
        service.slots.check()
        with service.paused():
            service.cache.check()
        assert "replayed" in outcomes, outcomes
    return churn


@pytest.mark.parametrize(("slots", "places", "steps"), [(12, 48, STEPS), (9, 30, STEPS // 2)])
def test_steps_do_not_notice(packs: FakePacks, model: FakeModel, slots: int, places: int, steps: int) -> None:
    churn = run(packs, model, slots, places, steps)
    assert churn.evicted > steps / 2
    assert churn.filled > steps / 8


def test_without_the_rest_of_places_it_shows(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: places that are written to while passes may read them."""

    def at_once(self: InlineCache, key: int) -> None:
        self._free.append(self._unbind(key))

    monkeypatch.setattr(InlineCache, "_retire", at_once)
    with pytest.raises(AssertionError, match=r"\(\d+, '"):
        run(packs, model, 12, 48, 20 * STEPS)


def test_there_is_nothing_to_churn_where_the_device_reads_no_arena(packs: FakePacks) -> None:
    with tiers(packs, slots=12) as service, pytest.raises(StepError, match="not read by the device"):
        service.churn()
