"""The twin of the device's own policy makes the same decisions as the kernels' reference, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.kernels import admission as rules
from ziggurat.residency.simulation.device import DevicePool, DeviceSettings
from ziggurat.residency.simulation.events import Events, make_events
from ziggurat.residency.simulation.simulate import make_pool, run, simulate
from ziggurat.residency.simulation.trace import make_trace


@settings(max_examples=200, deadline=None)
@given(heat=st.integers(0, rules.HEAT_MOST), age=st.integers(0, 1 << 14))
def test_heat_decays_as_on_the_device(heat: int, age: int) -> None:
    assert DeviceSettings().decayed(heat, age) == rules.decayed(heat, age)


def events_of(seed: int, tokens: int, layers: int, experts: int, steps: int, k: int) -> Events:
    random = np.random.default_rng(seed)
    skewed = random.zipf(1.5, size=(tokens, steps, layers, k)) % experts
    prompts = random.integers(0, steps // 2, size=tokens)
    return make_events(make_trace(skewed, experts=experts, prompts=prompts), tokens)


def admitted(events: Events, slots: int) -> Any:
    """The same events through the reference of the kernels, every row being in the arena."""
    reference = pytest.importorskip("ziggurat.kernels.cpu.admission")
    pool = torch.zeros((slots, 16), dtype=torch.uint8)
    arena = torch.zeros((events.layers * events.experts_per_layer, 16), dtype=torch.uint8)
    state = rules.make_admission(events.layers, events.experts_per_layer, arena, pool, log_events=1 << 16)
    state.places.copy_(torch.arange(len(arena), dtype=torch.int32))
    for step in range(events.steps.count):
        here = slice(events.steps.bounds[step], events.steps.bounds[step + 1])
        live = torch.tensor([here.stop - here.start], dtype=torch.int32)
        prefill = torch.from_numpy(events.steps.prefill[here].astype(np.uint8))
        for layer in range(events.layers):
            reference.admit(state, layer, torch.from_numpy(events.ids[here, layer]), live, prefill)
    return state


@pytest.mark.parametrize("slots", [7, 32, 45, 70])
@pytest.mark.parametrize("tokens", [1, 3])
def test_every_decision_is_that_of_the_kernels_reference(slots: int, tokens: int) -> None:
    events = events_of(slots + tokens, tokens, layers=3, experts=30, steps=60, k=4)
    state = admitted(events, slots)
    pool = make_pool(events, "device", slots, sharing="shared")
    assert isinstance(pool, DevicePool)
    found = run(events, "device", pool)
    head = int(state.state[rules.LOG_HEAD])
    assert [list(event) for event in pool.log] == state.log[:head].tolist()
    assert pool.owners == state.owners.tolist()
    assert pool.heat == state.heat.tolist()
    assert pool.last == state.last.tolist()
    assert pool.hand == int(state.state[rules.HAND])
    assert pool.clock == int(state.state[rules.CLOCK])
    assert found.all.rows == sum(event[2] >= 0 for event in pool.log)


def test_a_row_without_a_slot_is_not_served() -> None:
    """Two slots cannot hold the three experts of one layer."""
    events = make_events(make_trace(np.array([[[[0, 1, 2]]]]), experts=3), 1)
    found = simulate(events, "device", 67.0, sharing="shared")
    assert found.slots == 2
    assert (found.unserved, found.all.rows) == (1, 2)


def test_a_shorter_half_life_forgets_sooner() -> None:
    """Expert 0 was hot long ago; 1 is used now and then, 2 and 3 take turns."""
    early = [0] * 60
    late = [1 + step % 3 for step in range(200)]
    ids = np.array([early + late]).reshape(1, -1, 1, 1)
    events = make_events(make_trace(ids, experts=4), 1)
    slow = simulate(events, "device", 75.0, sharing="shared", device=DeviceSettings(half_life=1024))
    fast = simulate(events, "device", 75.0, sharing="shared", device=DeviceSettings(half_life=8))
    assert fast.all.hits > slow.all.hits
