"""The bound is the optimum: no choice of evictions brings fewer rows."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.residency.policies.registry import policy_names
from ziggurat.residency.simulation.belady import NEVER, next_uses
from ziggurat.residency.simulation.events import Events, make_events
from ziggurat.residency.simulation.simulate import DEVICE, make_pool, run
from ziggurat.residency.simulation.trace import make_trace


@st.composite
def small(draw: st.DrawFn) -> Events:
    """Few steps of two layers of three experts, up to two tokens a step."""
    sequences, positions = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    numbers = st.integers(0, 2)
    size = sequences * positions * 2 * 2
    ids = np.array(draw(st.lists(numbers, min_size=size, max_size=size)))
    return make_events(
        make_trace(ids.reshape(sequences, positions, 2, 2), experts=3), draw(st.integers(1, 2))
    )


def fewest_rows(events: Events, capacity: int) -> int:
    """Every choice tried. An event that fits is resident as a whole when it ends; one that does not has passed
    through, and any of its rows and of those before may stay."""
    sets = []
    for event in range(events.count):
        here = slice(events.bounds[event], events.bounds[event + 1])
        first = event % events.layers * events.experts_per_layer
        sets.append(frozenset((events.experts[here] + first).tolist()))

    @cache
    def best(event: int, resident: frozenset[int]) -> int:
        if event == len(sets):
            return 0
        wanted = sets[event]
        brought = len(wanted - resident)
        everything = resident | wanted
        if len(everything) <= capacity:
            return brought + best(event + 1, everything)
        must = wanted if len(wanted) <= capacity else frozenset()
        others = sorted(everything - must)
        kept = itertools.combinations(others, capacity - len(must))
        return brought + min(best(event + 1, must | frozenset(some)) for some in kept)

    return best(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(events=small(), capacity=st.integers(1, 5))
def test_no_choice_of_evictions_brings_fewer_rows(events: Events, capacity: int) -> None:
    pool = make_pool(events, "belady", capacity, sharing="shared")
    found = run(events, "belady", pool)
    assert found.all.rows == fewest_rows(events, capacity)
    assert pool.used <= capacity


@pytest.mark.parametrize("policy", [*policy_names(), DEVICE])
@settings(max_examples=25, deadline=None)
@given(events=small(), capacity=st.integers(4, 6))
def test_no_policy_brings_fewer_rows(policy: str, events: Events, capacity: int) -> None:
    bound = run(events, "belady", make_pool(events, "belady", capacity, sharing="shared")).all
    found = run(events, policy, make_pool(events, policy, capacity, sharing="shared")).all
    assert found.rows >= bound.rows
    assert found.pairs == bound.pairs


def test_next_uses_are_events() -> None:
    ids = np.array([[[0], [1]], [[0], [0]], [[1], [1]]])[None]  # [1, 3, 2, 1]
    events = make_events(make_trace(ids, experts=2), 1)
    assert next_uses(events).tolist() == [2, 5, NEVER, NEVER, NEVER, NEVER]
