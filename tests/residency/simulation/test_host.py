"""The tier below a simulated pool: what it is asked for, what it reads, and that a service counts the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import fake_moe
from support.fake_moe import EXPERTS, LAYERS, TOP_K, FakeModel, FakePacks
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.policies.lru import LruPolicy
from ziggurat.residency.policies.registry import host_policy_names
from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.events import make_events
from ziggurat.residency.simulation.host import (
    SimulatedArena,
    run_arena,
    simulated_host_names,
)
from ziggurat.residency.simulation.importers import import_trace
from ziggurat.residency.simulation.recorder import RoutingRecorder
from ziggurat.residency.simulation.requests import Requests
from ziggurat.residency.simulation.simulate import DEVICE, make_pool, run, simulate

DEMO = Path(__file__).parents[3] / "bench/traces/demo_moe.npz"


@pytest.fixture(scope="module")
def below() -> Requests:
    """What the device's rules ask for in a pool of a quarter, on a part of the committed trace."""
    events = make_events(import_trace(DEMO).part(0, 2, "short"), 2)
    requests = Requests.of(events)
    simulate(events, DEVICE, 25.0, sharing="shared", requests=requests)
    return requests


@pytest.mark.parametrize(
    ("policy", "sharing"), [("lru", "shared"), ("lru", "layer"), (DEVICE, "shared"), ("belady", "shared")]
)
def test_an_arena_is_asked_for_what_the_pool_brings(policy: str, sharing: str) -> None:
    events = make_events(import_trace(DEMO).part(0, 1, "short"), 1)
    requests = Requests.of(events)
    found = simulate(events, policy, 25.0, sharing=sharing, requests=requests)  # type: ignore[arg-type]  # a parameter
    asked = [sum(len(keys) for keys, _ in batches) for batches in requests.by_step()]
    assert asked == found.rows.tolist()
    for keys, weights in requests.batches:
        assert len({key // requests.experts for key in keys}) == 1, "a batch is one layer's"
        assert len(keys) == len(weights)


def test_hits_grow_with_places_and_nothing_beats_the_bound(below: Requests) -> None:
    for coverage in (25.0, 50.0):
        places = below.places_for(coverage)
        read = {name: int(run_arena(below, name, places).read.sum()) for name in simulated_host_names()}
        assert min(read, key=lambda name: read[name]) == "belady", read
        assert max(read.values()) < sum(len(keys) for keys, _ in below.batches)
    every = run_arena(below, "lru", below.layers * below.experts)
    distinct = {key for keys, _ in below.batches for key in keys}
    assert int(every.read.sum()) == len(distinct)
    assert every.evictions == 0


def test_the_numbers_of_a_result_belong_together(below: Requests) -> None:
    found = run_arena(below, "lru", below.places_for(25.0))
    line = found.to_json()
    assert line["asked"] == sum(len(keys) for keys, _ in below.batches)
    assert line["hit_ratio"] == pytest.approx(1 - line["read"] / line["asked"], abs=1e-6)
    assert line["evictions"] == line["read"] - found.places
    assert 0 < found.cold < len(found.asked)
    assert line["read_per_step"] == pytest.approx(float(found.read[found.cold :].mean()), abs=1e-4)


def test_layers_with_a_floor_are_another_arena(below: Requests) -> None:
    places = below.places_for(50.0)
    plain, floored = run_arena(below, "lru", places), run_arena(below, "lru", places, floor=1.0)
    assert plain.read.tolist() != floored.read.tolist()


def test_a_scan_displaces_nothing() -> None:
    arena = SimulatedArena(LruPolicy(), 3, 12, staging=2)
    assert arena.ask([1, 2], [1, 1]) == [0, 1]
    assert arena.ask([3, 4, 5, 6, 7], [0, 0, 0, 0, 0]) == [0, 1, 2, 3, 4]
    assert arena.ask([1, 2, 3], [1, 1, 0]) == [], "one of the scan found a free place"
    assert arena.evictions == 0
    assert arena.ask([8], [1]) == [0]
    assert arena.ask([1, 2], [1, 1]) == [], "the scan's row left first"


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=9
    ),
    places=st.integers(1, 5),
)
def test_the_bound_is_what_brute_force_finds(batches: list[list[int]], places: int) -> None:
    requests = Requests(1, 8, 1)
    for keys in batches:
        requests.ask(keys, [1] * len(keys))
        requests.end_step()
    # The least number of reads, over every set of rows that could be kept after each single request.
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for key in itertools.chain.from_iterable(batches):
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            price = cost + (key not in held)
            whole = held | {key}
            options = [whole] if len(whole) <= places else [whole - {one} for one in whole]
            for option in options:
                following[option] = min(price, following.get(option, price))
        states = following
    assert int(run_arena(requests, "belady", places).read.sum()) == min(states.values())


def test_what_cannot_be_simulated_is_refused(below: Requests) -> None:
    with pytest.raises(SimulationError, match="no policy 'next-use'; there are arc"):
        run_arena(below, "next-use", 10)
    for coverage in (0.0, 101.0):
        with pytest.raises(SimulationError, match="not between 0 and 100"):
            below.places_for(coverage)


# -- the service ---------------------------------------------------------------------------------------------------


def batch(step: int) -> tuple[int, np.typing.NDArray[np.bool_] | None]:
    """Tokens of a step and which are prefill: a prompt joins every now and then."""
    if step % 9 == 5:
        prefill = np.ones(7, dtype=np.bool_)
        prefill[:2] = False
        return 7, prefill
    return 1 + step % 3, None


@pytest.mark.parametrize("policy", host_policy_names())
@pytest.mark.parametrize(("slots", "places", "floor"), [(5, 14, None), (10, 30, None), (10, 30, 50)])
def test_arena_reads_are_those_of_the_service(
    packs: FakePacks,
    model: FakeModel,
    policy: str,
    slots: int,
    places: int,
    floor: int | None,
) -> None:
    recorder = RoutingRecorder(packs.geometry)
    written = {"eviction": "lru", "host": policy, "host_floor": floor}
    with fake_moe.tiers(
        packs, slots=slots, places=places, policy=written, miss={"mode": "inline"}
    ) as service:
        for step in range(30):
            count, prefill = batch(step)
            x = torch.cat([model.inputs(1, seed=(3 * step + token * step) % 13) for token in range(count)])
            tokens = StepTokens(count, prefill)

            def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                recorder.layer(layer, ids)
                return service.moe(layer, h, weights, ids)

            service.run_step(lambda path, x=x: model.forward(x, moe), tokens)  # type: ignore[misc]  # bound now
            recorder.step(tokens)
        service.cache.check()
    events = make_events(recorder.trace(), 1)
    requests = Requests.of(events)
    pool = make_pool(events, "lru", slots, sharing="shared", atomic=False)
    run(events, "lru", pool, requests)
    assert (requests.layers, requests.experts, requests.top_k) == (LAYERS, EXPERTS, TOP_K)
    staging = service.cache.staging
    found = run_arena(
        requests, policy, places - staging, floor=None if floor is None else floor / 100, staging=staging
    )
    metric = service.metrics.value
    assert int(found.asked.sum()) - int(found.read.sum()) == metric("ziggurat_tier_hits_total", "arena")
    assert int(found.read.sum()) == metric("ziggurat_tier_misses_total", "arena")
    assert found.evictions == service.cache.evictions == metric("ziggurat_evictions_total", "arena")
    assert found.evictions > 0
