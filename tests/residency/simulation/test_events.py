"""Steps of sequences side by side, and the events that pools see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.residency.groups import group_pairs
from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.events import make_events, make_steps
from ziggurat.residency.simulation.trace import Trace, make_trace


def trace_of(lengths: list[int], prompts: list[int] | None = None, **more: object) -> Trace:
    random = np.random.default_rng(3)
    ids = random.integers(0, 6, size=(len(lengths), max(lengths), 2, 3))
    return make_trace(ids, experts=6, lengths=lengths, prompts=prompts, **more)  # type: ignore[arg-type]


def steps_of(trace: Trace, batch: int) -> list[list[tuple[int, int]]]:
    """(sequence, position) of every token of every step."""
    steps = make_steps(trace, batch)
    flat = [divmod(token, trace.positions) for token in steps.tokens.tolist()]
    return [flat[first:last] for first, last in zip(steps.bounds, steps.bounds[1:], strict=False)]


def test_a_sequence_that_ends_is_replaced_by_the_next() -> None:
    assert steps_of(trace_of([3, 1, 2]), 2) == [
        [(0, 0), (1, 0)],
        [(0, 1), (2, 0)],
        [(0, 2), (2, 1)],
    ]


def test_one_at_a_time_is_in_order() -> None:
    assert steps_of(trace_of([2, 2]), 1) == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]


def test_a_prompt_is_one_scan_beside_the_others() -> None:
    trace = trace_of([4, 3], prompts=[3, 0])
    assert steps_of(trace, 2) == [
        [(0, 0), (0, 1), (0, 2), (1, 0)],
        [(0, 3), (1, 1)],
        [(1, 2)],
    ]
    events = make_events(trace, 2)
    assert events.steps.prefill.tolist() == [True, True, True, False, False, False, False]
    assert events.decoding(0).tolist() == [3]
    first = slice(0, events.bounds[1])
    assert events.pairs[first].sum() == 12
    assert events.weights[first].sum() == 3


def test_recorded_steps_are_taken_as_they_are() -> None:
    trace = trace_of([5], batches=[0, 2, 2, 5], prefill=[True, False, False, False, True])
    steps = make_steps(trace, 7)
    assert steps.bounds.tolist() == [0, 2, 2, 5]
    events = make_events(trace, 7)
    assert events.count == 6
    assert events.bounds[2:5].tolist() == [events.bounds[2]] * 3, "a step without tokens has empty events"


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(SimulationError, match="no token"):
        make_steps(make_trace(np.zeros((1, 2, 1, 1), np.int64), lengths=[0]), 1)
    with pytest.raises(SimulationError, match="at least 1 sequence"):
        make_steps(trace_of([2]), 0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    batch=st.integers(1, 6),
    prompt=st.integers(0, 3),
)
def test_events_group_tokens_as_the_service_does(lengths: list[int], batch: int, prompt: int) -> None:
    trace = trace_of(lengths, [min(prompt, length) for length in lengths])
    events = make_events(trace, batch)
    steps = events.steps
    assert sorted(steps.tokens.tolist()) == sorted(
        s * trace.positions + p for s, length in enumerate(lengths) for p in range(length)
    )
    for step in range(steps.count):
        first, last = steps.bounds[step], steps.bounds[step + 1]
        for layer in range(trace.layers):
            event = step * trace.layers + layer
            here = slice(events.bounds[event], events.bounds[event + 1])
            groups = group_pairs(events.ids[first:last, layer], 6, steps.prefill[first:last])
            assert events.experts[here].tolist() == groups.experts.tolist()
            assert events.pairs[here].tolist() == groups.counts.tolist()
            assert events.weights[here].tolist() == groups.weights.tolist()
