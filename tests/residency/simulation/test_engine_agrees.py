"""The simulator is the engine without rows: on a recorded run both count the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from support.fake_moe import EXPERTS, LAYERS, TOP_K, FakeModel, FakePacks, tiers
from ziggurat.residency.passes import PassPath, StepTokens
from ziggurat.residency.policies.registry import policy_names
from ziggurat.residency.service import ExpertService
from ziggurat.residency.simulation.events import make_events
from ziggurat.residency.simulation.recorder import RoutingRecorder
from ziggurat.residency.simulation.simulate import make_pool, run
from ziggurat.residency.simulation.trace import Trace


def forward(
    model: FakeModel, service: ExpertService, recorder: RoutingRecorder, x: torch.Tensor, path: PassPath
) -> torch.Tensor:
    def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        recorder.layer(layer, ids)
        return service.moe(layer, h, weights, ids)

    return model.forward(x, moe)


def batch(step: int) -> tuple[int, np.typing.NDArray[np.bool_] | None]:
    """Tokens of a step and which are prefill: one stream that others join with their prompts, and leave."""
    if step % 11 == 4:
        prefill = np.ones(7, dtype=np.bool_)
        prefill[:2] = False
        return 7, prefill
    return 1 + step % 3, None


def record(
    packs: FakePacks, model: FakeModel, policy: str, slots: int, steps: int
) -> tuple[Trace, ExpertService]:
    """A run of a service that serves misses inline, and its trace. The service is closed; its numbers stay."""
    recorder = RoutingRecorder(packs.geometry)
    with tiers(packs, slots=slots, eviction=policy, miss={"mode": "inline"}) as service:
        for step in range(steps):
            count, prefill = batch(step)
            # Few different inputs, so that routing repeats as text does.
            x = torch.cat([model.inputs(1, seed=(3 * step + token * step) % 13) for token in range(count)])
            tokens = StepTokens(count, prefill)
            service.run_step(partial(forward, model, service, recorder, x), tokens)
            recorder.step(tokens)
        service.slots.check()
    return recorder.trace(), service


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("slots", [5, 24])
def test_hits_misses_and_evictions_are_those_of_the_service(
    packs: FakePacks, model: FakeModel, policy: str, slots: int
) -> None:
    trace, service = record(packs, model, policy, slots, steps=24)
    events = make_events(trace, 1)
    pool = make_pool(events, policy, slots, sharing="shared", atomic=False)
    found = run(events, policy, pool).all
    metric = service.metrics.value
    assert found.steps == 24
    assert found.pairs == metric("ziggurat_routed_pairs_total")
    assert found.hits == metric("ziggurat_hit_pairs_total")
    assert found.pairs - found.hits == metric("ziggurat_missed_pairs_total")
    assert found.evictions == service.slots.evictions == metric("ziggurat_evictions_total", "pool")
    assert found.zero_miss_steps == metric("ziggurat_steps_without_miss_total")
    assert found.rows > found.evictions > 0


def test_another_policy_would_not_have_agreed(packs: FakePacks, model: FakeModel) -> None:
    trace, service = record(packs, model, "lru", 24, steps=24)
    events = make_events(trace, 1)
    other = run(events, "sieve", make_pool(events, "sieve", 24, sharing="shared", atomic=False)).all
    assert other.hits != service.metrics.value("ziggurat_hit_pairs_total")


def test_the_trace_is_the_routing_of_the_all_resident_model(packs: FakePacks, model: FakeModel) -> None:
    """Also from replayed steps, whose first passes route elsewhere."""
    recorder = RoutingRecorder(packs.geometry)
    wanted: list[torch.Tensor] = []
    with tiers(packs, slots=30, miss={"mode": "replay", "max_replays": 1}) as service:
        passes = 0
        for seed in range(3):
            x = model.inputs(2, seed=seed)
            chosen = torch.zeros((2, LAYERS, TOP_K), dtype=torch.int64)

            def note(
                layer: int,
                h: torch.Tensor,
                weights: torch.Tensor,
                ids: torch.Tensor,
                chosen: torch.Tensor = chosen,
            ) -> torch.Tensor:
                chosen[:, layer] = ids
                return packs.resident()(layer, h, weights, ids)

            model.forward(x, note)
            wanted.append(chosen)
            result = service.run_step(partial(forward, model, service, recorder, x), StepTokens(2))
            recorder.step(StepTokens(2))
            passes += result.passes
    trace = recorder.trace()
    assert passes > 3, "some step was repaired"
    assert np.array_equal(trace.ids[0], torch.cat(wanted).numpy())
    assert trace.batches is not None
    assert trace.batches.tolist() == [0, 2, 4, 6]
    assert (trace.experts, trace.layers, trace.top_k) == (EXPERTS, LAYERS, TOP_K)


def test_recording_ends_when_enough_is_known(packs: FakePacks) -> None:
    recorder = RoutingRecorder(packs.geometry, most_tokens=5)
    for tokens in (3, 4, 1):
        recorder.layer(0, torch.zeros((tokens, TOP_K), dtype=torch.int64))
        recorder.step(StepTokens(tokens))
    assert recorder.full
    assert recorder.trace().tokens == 3
