"""The static tensors: what a pass finds in them, and what it leaves for the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, tiers
from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.placement import Placement
from ziggurat.residency.runtime_errors import RoutingError, SlotError, StepError, UnsupportedDeviceError
from ziggurat.residency.slots import SlotTable

CPU = torch.device("cpu")


def test_nothing_is_live_outside_a_pass() -> None:
    state = DeviceState(2, 3, 8, CPU)
    assert state.live.tolist() == [0]
    state.arm(5, None)
    state.tally += 4
    state.counts_of[1][:] = 2
    assert state.live.tolist() == [5]
    state.disarm()
    assert state.live.tolist() == [0]
    counted = state.counted()
    assert (counted.missing, counted.invalid, counted.absent) == (4, 4, 4)
    assert counted.pairs.tolist() == [[0, 0, 0], [2, 2, 2]]
    state.arm(1, None)
    assert state.tally.tolist() == [0, 0, 0]
    assert int(state.counts_of[1].sum()) == 0


def test_addresses_never_change() -> None:
    state = DeviceState(2, 3, 8, CPU)
    parts = [state.live, state.tally, state.prefill, state.table, state.chunk, *state.counts_of]
    before = [part.data_ptr() for part in parts]
    table = SlotTable(2, 3, 4, "w2")
    table.bind(3, 5)
    for live in (8, 2):
        state.arm(live, np.ones(live, dtype=np.bool_))
        state.show(table)
        state.disarm()
    assert [part.data_ptr() for part in parts] == before
    assert state.table.tolist() == [[-1, -1, -1], [-1, -1, 3]]


def test_flags_of_an_earlier_step_are_cleared() -> None:
    state = DeviceState(1, 3, 8, CPU)
    state.arm(6, np.array([True] * 6))
    assert state.prefill[:6].tolist() == [1] * 6
    state.arm(2, np.array([False, True]))
    assert state.prefill.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    state.arm(3, None)
    assert not state.prefill.any()


def test_the_table_is_sent_when_it_has_changed() -> None:
    state = DeviceState(1, 3, 8, CPU)
    table = SlotTable(1, 3, 4, "w2")
    table.bind(2, 1)
    state.show(table)
    state.table.fill_(7)  # only to see whether it is written
    state.show(table)
    assert state.table.tolist() == [[7, 7, 7]]
    table.unbind(2)
    state.show(table)
    assert state.table.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("rows", "live", "most", "sizes", "lives"),
    [
        (8, 5, 8, [8], [5]),
        (8, 5, 4, [4, 4], [4, 1]),
        (7, 3, 3, [3, 3, 1], [3, 0, 0]),
        (9, 9, 8, [5, 4], [5, 4]),
    ],
)
def test_large_batches_come_in_parts(
    rows: int, live: int, most: int, sizes: list[int], lives: list[int]
) -> None:
    state = DeviceState(1, 3, 16, CPU)
    state.arm(live, None)
    parts = state.parts(rows, live, most)
    assert [count for _, count, _ in parts] == sizes
    assert [first for first, _, _ in parts] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert [int(one[0]) for _, _, one in parts] == lives


def test_batches_that_are_too_large(packs: FakePacks, model: FakeModel) -> None:
    with pytest.raises(StepError, match="at least 1 token"):
        DeviceState(1, 3, 0, CPU)
    with tiers(packs, slots=12, on_device=True, max_tokens=4) as service:
        run = Passes(model, service)
        with pytest.raises(StepError, match="largest batch, 4"):
            run.step(model.inputs(5))
        with pytest.raises(RoutingError, match="largest batch was said to have 4"):
            run.step(model.inputs(3), padding=2)
        x = model.inputs(4)
        assert bits_equal(run.step(x).value, packs.reference(model, x))


def test_an_unarmed_call_makes_the_launches_of_an_armed_one(packs: FakePacks, model: FakeModel) -> None:
    """What a graph captures outside a step is what it has to replay inside."""
    with tiers(packs, slots=12, on_device=True, miss={"mode": "replay"}) as service:
        calls: list[tuple[str, list[int]]] = []
        kernels = service._layers._kernels  # type: ignore[union-attr]  # a service with kernels
        launch = kernels.run

        def run(x: torch.Tensor, *args: torch.Tensor, **static: Any) -> torch.Tensor:
            calls.append(("armed" if int(static["live"][0]) else "unarmed", []))
            calls[-1][1].extend(one.data_ptr() for one in static.values())
            return launch(x, *args, **static)

        kernels.run = run  # type: ignore[method-assign]  # to look at the calls
        x = model.inputs(2)
        unarmed = model.forward(x, service.moe)
        assert bits_equal(unarmed, x), "no expert contributes"
        Passes(model, service).step(x)
        before = [addresses for kind, addresses in calls if kind == "unarmed"]
        within = [addresses for kind, addresses in calls if kind == "armed"]
        assert before == within[:4], "one call for each of the four layers"


def test_a_service_goes_on_with_another_number_of_slots(packs: FakePacks, model: FakeModel) -> None:
    x = model.inputs(4)
    expected = packs.reference(model, x)
    with tiers(packs, slots=48, on_device=True) as service:
        service.warm_start()
        run = Passes(model, service)
        assert run.step(x).passes == 1
        for slots, seed in ((12, None), (5, 3), (1, 4), (48, 5)):
            service.resize(slots, slot_seed=seed)
            assert (service.slots.slots, service.slots.used) == (slots, 0)
            result = run.step(x)
            assert bits_equal(result.value, expected)
            assert result.misses_first_pass > 0
            assert service.slots.used <= slots
            service.slots.check()
        with pytest.raises(SlotError, match="cannot go on with 49"):
            service.resize(49)
        with pytest.raises(StepError, match="within a step"):
            service.run_step(lambda path: service.resize(4), StepTokens(0))


def test_a_gpu_that_is_not_here_and_activations_it_does_not_take() -> None:
    for place, codec, message in (
        (Placement(torch.device("meta")), "w2", "not on meta"),
        (Placement(torch.device("cuda", 99)), "w2", "no cuda:99"),
    ):
        with pytest.raises(UnsupportedDeviceError, match=message):
            place.check(codec)
    for dtype, codec, message in (
        (torch.float32, "w2", "not float32"),
        (torch.float16, "bf16", "need bfloat16"),
    ):
        with pytest.raises(UnsupportedDeviceError, match=message):
            Placement(torch.device("cuda", 0), dtype).check_dtype(codec)
    Placement(torch.device("cuda", 0), torch.float16).check_dtype("fp4")


def test_a_complete_pool_that_was_filled_anew_is_shown_again(packs: FakePacks, model: FakeModel) -> None:
    x = model.inputs(3)
    expected = packs.reference(model, x)
    with tiers(packs, slots=48, on_device=True) as service:
        run = Passes(model, service)
        for seed in (None, 7):
            service.resize(48, slot_seed=seed)
            service.warm_start()
            assert bits_equal(run.step(x).value, expected)
            assert bits_equal(run.step(x).value, expected)
