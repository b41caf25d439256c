"""Prompts that stream out of an arena that is churned and promoted into, on a device whose copies come late."""

from __future__ import annotations

import numpy as np
import pytest

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, tiers
from support.lazy_device import Device, LazyPool, Name
from support.streams import lazy_kernels
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.streaming.ring import StagingRing

ROUNDS = 6


@pytest.mark.parametrize("places", [48, 20])
@pytest.mark.parametrize("early", ["copies", "kernels"])
def test_bits_are_those_of_the_resident_model(
    packs: FakePacks, model: FakeModel, early: Name, places: int
) -> None:
    device, stride = Device(early), packs.open().header.stride
    options = {
        "pool": LazyPool(device, 12, stride),
        "ring": StagingRing([LazyPool(device, 3, stride) for _ in range(2)]),
        "kernels": lazy_kernels(packs, device, part_tokens=20),
    }
    outcomes = set()
    with tiers(packs, slots=12, places=places, inline=True, **options) as service:
        service.warm_start()
        run = Passes(model, service)
        with service.churn(seed=places):
            for number in range(ROUNDS):
                for tokens, prompt in ((1, 0), (30, 28), (2, 0), (6, 5)):
                    x = model.inputs(tokens, seed=number)
                    step = StepTokens(tokens, np.arange(tokens) < prompt if prompt else None)
                    result = run.step(x, step)
                    assert bits_equal(result.value, packs.reference(model, x)), (
                        number,
                        tokens,
                        result.outcome,
                    )
                    outcomes.add(result.outcome)
        service.slots.check()
    assert "streamed" in outcomes
    assert outcomes & {"replayed", "exact"}
