"""Counts of whole simulations, exact on the committed trace."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.simulation.cost import StepCost
from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.events import Events, make_events
from ziggurat.residency.simulation.simulate import make_pool, simulate, simulated_names
from ziggurat.residency.simulation.trace import make_trace, read_trace

DEMO = Path(__file__).parents[3] / "bench/traces/demo_moe.npz"


@cache
def demo(batch: int) -> Events:
    return make_events(read_trace(DEMO).part(0, 4, "demo"), batch)


#: Hits of 49152 routed pairs: one stream, each layer its own pool of half of the experts; one stream and four, one pool
#: of a quarter.
GOLDEN: dict[str, tuple[int, int, int]] = {
    "arc": (39525, 23714, 9058),
    "clock": (39789, 23628, 459),
    "heat-weighted": (41426, 28662, 24670),
    "lfru": (40290, 9191, 5660),
    "lfu-decay": (40931, 27324, 24116),
    "lru": (39524, 23494, 235),
    "next-use": (42055, 31263, 26167),
    "s3-fifo": (40927, 25047, 15892),
    "sieve": (40668, 20659, 5660),
    "slru": (40714, 16396, 5660),
    "w-tinylfu": (41146, 25710, 5688),
    "device": (0, 27826, 24121),
    "belady": (44457, 35873, 29597),
}


@pytest.mark.parametrize("policy", sorted(GOLDEN))
def test_golden_hits(policy: str) -> None:
    own = 0 if policy == "device" else simulate(demo(1), policy, 50).all.hits
    one, four = (simulate(demo(batch), policy, 25, sharing="shared").all.hits for batch in (1, 4))
    assert (own, one, four) == GOLDEN[policy]


def test_every_policy_has_golden_hits() -> None:
    assert set(GOLDEN) == set(simulated_names())


def test_the_bound_is_above_all_and_ours_is_next() -> None:
    ranked = sorted(GOLDEN, key=lambda name: GOLDEN[name][1], reverse=True)
    assert ranked[:3] == ["belady", "next-use", "heat-weighted"]


def test_cold_and_steady_steps_make_up_all() -> None:
    result = simulate(demo(1), "lru", 50)
    assert 0 < result.cold < 100
    for field in ("steps", "pairs", "hits", "rows", "evictions", "zero_miss_steps"):
        assert getattr(result.cold_start, field) + getattr(result.steady, field) == getattr(result.all, field)
    assert result.steady.hit_ratio > result.cold_start.hit_ratio
    assert result.all.rows - result.all.evictions == result.slots, "a full pool stays full"


def test_a_pool_that_never_fills_is_cold_throughout() -> None:
    events = make_events(make_trace(np.zeros((1, 5, 1, 2), dtype=np.int64), experts=8), 1)
    result = simulate(events, "lru", 50)
    assert (result.cold, result.steady.steps) == (5, 0)
    assert result.steady.hit_ratio == 0.0
    assert result.all.evictions == 0


def test_a_scan_does_not_wipe_the_set_that_decode_uses() -> None:
    """One sequence decodes on two experts while prompts run through all others beside it."""
    steps, prompt = 30, 12
    ids = np.zeros((2 + steps // 6, steps, 1, 2), dtype=np.int64)
    ids[0] = [0, 1]
    lengths, prompts = [steps], [0]
    for scan in range(1, len(ids)):
        ids[scan, :prompt, 0] = (np.arange(2 * prompt) % 14 + 2).reshape(prompt, 2)
        lengths.append(prompt)
        prompts.append(prompt)
    trace = make_trace(ids, experts=16, lengths=lengths, prompts=prompts)
    events = make_events(trace, 2)
    for policy in ("lru", "lfu-decay", "sieve", "arc", "next-use"):
        found = simulate(events, policy, 50, sharing="shared").all
        assert found.decode_pairs == 2 * steps
        assert found.decode_hits == 2 * steps - 2, policy
        assert found.rows > 14


def test_a_layer_does_not_evict_rows_of_its_own_step() -> None:
    """Two slots, three experts in turn, two at a time: with LRU by single uses the first one would leave before the
    second is looked at."""
    ids = np.array([[[[0, 1]], [[1, 2]], [[2, 0]]]])
    events = make_events(make_trace(ids, experts=3), 1)
    for policy in simulated_names():
        if policy != "device":
            found = simulate(events, policy, 67, sharing="shared").all
            assert (found.hits, found.rows) == (2, 4), policy


def test_an_event_larger_than_the_pool_passes_in_rounds() -> None:
    ids = np.array([[[[0, 1, 2, 3]], [[0, 1, 2, 3]]]])
    events = make_events(make_trace(ids, experts=4), 1)
    for policy in simulated_names():
        if policy != "device":
            found = simulate(events, policy, 50, sharing="shared").all
            assert (found.hits, found.rows, found.evictions) == (2, 6, 4), policy


def test_wrong_uses_are_named() -> None:
    with pytest.raises(SimulationError, match="did you mean 'lru'"):
        simulate(demo(1), "lruu", 50)
    with pytest.raises(SimulationError, match="coverage of 0"):
        simulate(demo(1), "lru", 0)
    with pytest.raises(SimulationError, match="one pool for all layers"):
        simulate(demo(1), "device", 50)
    with pytest.raises(SimulationError, match="7 slots cannot be given to 6 layers"):
        make_pool(demo(1), "lru", 7)


def test_a_half_life_reaches_the_policy() -> None:
    quick, slow = (
        simulate(demo(1), "lfu-decay", 25, settings=PolicySettings(half_life=steps)).all.hits
        for steps in (16, 2048)
    )
    assert quick != slow


def test_step_times_follow_from_rows() -> None:
    cost = StepCost(row_bytes=7_000_000, link_gb_per_s=50.0, resident_ms=10.0)
    assert cost.milliseconds(0) == 10.0
    assert cost.milliseconds(10) == pytest.approx(1.08 * (10.0 + 1.4))
    result = simulate(demo(1), "lru", 50)
    times = result.step_ms(cost)
    assert times["mean"] < times["p99"]
    assert result.all.to_json(cost)["bytes_per_step"] == round(result.all.rows_per_step * 7_000_000)
