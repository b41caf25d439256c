"""The rules by which a layer makes its own experts resident, on the twin that the CUDA kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.admissions import copied, differences, over_rows, pattern_rows, random_calls
from ziggurat.kernels.admission import (
    CANDIDATES,
    CLOCK,
    COPIES,
    HALF_LIFE,
    HAND,
    HEAT_MOST,
    HEAT_UNIT,
    LOG_HEAD,
    WITHHELD,
    Admission,
    decayed,
    make_admission,
)
from ziggurat.kernels.cpu.admission import admit, copy_rows

STRIDE = 16


def empty(layers: int, experts: int, slots: int, **options: Any) -> Admission:
    return over_rows(pattern_rows(layers * experts, STRIDE), layers, slots, **options)


def call(
    a: Admission, layer: int, ids: Sequence[Sequence[int]], live: int | None = None, prefill: object = None
) -> None:
    """Admit and copy."""
    flags = None if prefill is None else torch.tensor(prefill, dtype=torch.uint8)
    admit(a, layer, torch.tensor(ids), torch.tensor([len(ids) if live is None else live]), flags)
    copy_rows(a)


def state(a: Admission) -> list[int]:
    return a.state[: COPIES + 1].tolist()


def hold(a: Admission, slot: int, key: int, heat: int = 0, last: int = 0) -> None:
    """Put a row of this heat into a slot by hand."""
    a.owners[slot], a.table.view(-1)[key] = key, slot
    a.heat[key], a.last[key] = heat, last


def key_in(a: Admission, slot: int) -> int:
    """Whose row the slot holds."""
    words = a.pool[slot].view(torch.int32)
    assert (words == words[0]).all()
    return int(words[0])


def test_misses_take_free_slots_in_ascending_order_of_experts() -> None:
    a = empty(2, 8, 100)
    call(a, 1, [[5, 2], [7, 2]])
    assert a.table[1].tolist() == [-1, -1, 0, -1, -1, 32, -1, 64]
    assert a.table[0].tolist() == [-1] * 8
    assert [(slot, a.owners[slot].item()) for slot in (0, 32, 64)] == [(0, 10), (32, 13), (64, 15)]
    assert [key_in(a, slot) for slot in (0, 32, 64)] == [10, 13, 15]
    assert state(a) == [0, 96, 3, 3]
    assert a.log[:3].tolist() == [[0, 10, 0, -1], [0, 13, 32, -1], [0, 15, 64, -1]]
    assert a.copies[:3].tolist() == [
        [a.places[key].item(), slot] for key, slot in ((10, 0), (13, 32), (15, 64))
    ]


def test_the_first_layer_advances_the_clock_unless_nothing_is_live() -> None:
    a = empty(3, 4, 20)
    b = empty(3, 4, 20, first=1)
    for layer, clocks in ((0, (1, 0)), (1, (1, 1)), (2, (1, 1)), (0, (2, 1)), (1, (2, 2))):
        call(a, layer, [[0]])
        call(b, layer, [[0]])
        assert (a.state[CLOCK].item(), b.state[CLOCK].item()) == clocks
    before = copied(a)
    call(a, 0, [[1], [2]], live=0)
    assert before.state[COPIES] == 0
    assert differences(a, before) == []


def test_a_call_without_live_tokens_leaves_no_copies() -> None:
    a = empty(1, 4, 4)
    call(a, 0, [[0]])
    assert a.state[COPIES] == 1
    call(a, 0, [[1]], live=0)
    assert state(a) == [1, 0, 1, 0]


def test_heat_counts_the_pairs_of_tokens_that_are_not_prefill() -> None:
    a = empty(1, 6, 6)
    call(a, 0, [[0, 1], [1, 2], [3, 6], [-1, 1], [4, 5]], live=4, prefill=[0, 0, 1, 0, 0])
    assert a.heat.tolist() == [HEAT_UNIT, 3 * HEAT_UNIT, HEAT_UNIT, 0, 0, 0]
    assert a.last.tolist() == [1, 1, 1, 0, 0, 0]
    assert a.table[0].tolist() == [0, 2, 4, 1, -1, -1], "an expert of a prompt is admitted as well"


def test_heat_halves_every_half_life_and_stops_at_the_most() -> None:
    a = empty(1, 2, 2)
    for before, age, after in (
        (1 << 20, HALF_LIFE, (1 << 19) + HEAT_UNIT),
        (1 << 20, HALF_LIFE // 2, (3 << 18) + HEAT_UNIT),
        (HEAT_MOST, 0, HEAT_MOST),
        (HEAT_MOST, 1, HEAT_MOST - (HEAT_MOST >> 1) // HALF_LIFE + HEAT_UNIT),
        (HEAT_MOST, 32 * HALF_LIFE, HEAT_UNIT),
        (7, 3, 7 + HEAT_UNIT),
    ):
        a.heat[0], a.last[0], a.state[CLOCK] = before, 999, 999 + age - 1
        call(a, 0, [[0]])
        assert a.heat[0] == after
        assert a.last[0] == a.state[CLOCK] == 999 + age


def test_decay_is_monotonic_and_never_below_half() -> None:
    for heat in (0, 1, 2, 4095, 4096, 12345, HEAT_MOST):
        values = [decayed(heat, age) for age in range(3 * HALF_LIFE)]
        assert values == sorted(values, reverse=True)
        assert [values[i * HALF_LIFE] for i in range(3)] == [heat, heat >> 1, heat >> 2]


def test_the_coldest_of_the_candidates_goes_and_the_first_of_equals() -> None:
    a = empty(2, 64, 64)
    for slot in range(64):
        hold(a, slot, slot, heat=HEAT_UNIT * 50)
    for slot in (3, 20, 29):
        a.heat[slot] = HEAT_UNIT * 5
    a.heat[40] = 0  # colder, but not among the first candidates
    call(a, 1, [[9]])
    assert a.owners[3] == 64 + 9
    assert a.table[0, 3] == -1
    assert a.log[0].tolist() == [0, 73, 3, 3]
    a.state[HAND] = 30
    call(a, 1, [[9, 10, 11]])  # 9 is resident by now
    assert a.table[1, 10] == 40, "from the hand on"
    assert a.table[1, 11] == 20, "62, 63, then around"
    assert a.state[HAND] == 30


def test_age_counts_in_the_choice() -> None:
    a = empty(2, 4, 4)
    a.state[CLOCK] = 10 * HALF_LIFE
    for slot, (heat, age) in enumerate(((4096, 0), (40960, 4 * HALF_LIFE), (6000, 0), (5000, 0))):
        hold(a, slot, slot, heat, 10 * HALF_LIFE - age)
    call(a, 1, [[0]])
    assert a.owners.tolist() == [0, 4, 2, 3]


def test_a_free_slot_is_better_than_one_of_no_heat() -> None:
    a = empty(2, 40, 40)
    for slot in range(40):
        hold(a, slot, slot)
    a.owners[31], a.table[0, 31] = -1, -1
    call(a, 1, [[5]])
    assert a.table[1, 5] == 31
    assert a.log[0].tolist() == [0, 45, 31, -1]


def test_withheld_slots_are_never_used() -> None:
    a = empty(2, 8, 6)
    a.owners[2:] = WITHHELD
    for _ in range(5):
        call(a, 0, [[0, 1]])
        call(a, 1, [[2, 3]])
    assert a.owners.tolist() == [10, 11, *[WITHHELD] * 4]
    call(a, 0, [[4, 5, 6]])
    assert a.owners.tolist() == [4, 5, *[WITHHELD] * 4]
    assert a.table[0, 6] == -1


def test_a_slot_of_this_call_is_never_taken() -> None:
    """Even the coldest; and a resident expert of the layer that nobody asks for is taken like any other."""
    a = empty(1, 8, 4)
    for slot, key in enumerate((6, 1, 2, 3)):
        hold(a, slot, key, heat=HEAT_UNIT * (0 if key != 6 else 9))
    call(a, 0, [[1, 2], [3, 4]], prefill=[1, 1])
    assert a.owners.tolist() == [4, 1, 2, 3]
    assert a.table[0].tolist() == [-1, 1, 2, 3, 0, -1, -1, -1]


def test_looks_that_find_none_are_followed_by_more() -> None:
    a = empty(1, 70, 70)
    for slot in range(64):
        hold(a, slot, slot)
    a.state[HAND] = 0
    call(a, 0, [[*range(65)]])
    assert a.table[0, 64] == 64, "two looks over slots in use"
    assert a.state[HAND] == 96 % 70
    call(a, 0, [[*range(70)]])
    assert sorted(a.table[0].tolist()) == list(range(70))


def test_rows_that_are_not_in_the_arena_are_logged_and_change_nothing_else() -> None:
    a = over_rows(pattern_rows(6, STRIDE), 1, 6, absent=[1, 4])
    call(a, 0, [[1, 2, 4]])
    assert a.table[0].tolist() == [-1, -1, 0, -1, -1, -1]
    assert a.log[:3].tolist() == [[1, 1, -1, -1], [1, 2, 0, -1], [1, 4, -1, -1]]
    assert state(a) == [1, 32 % 6, 3, 1]
    a.places[4] = a.places[0]
    call(a, 0, [[1, 2, 4]])
    assert a.table[0].tolist() == [-1, -1, 0, -1, 2, -1]
    assert a.log[3:5].tolist() == [[2, 1, -1, -1], [2, 4, 2, -1]]
    assert key_in(a, 2) == 0, "what lies in its place"


def test_a_pool_smaller_than_the_layers_set_is_filled_and_the_rest_is_missing() -> None:
    a = empty(1, 8, 3)
    call(a, 0, [[0, 2, 4, 6, 7]])
    assert a.table[0].tolist() == [0, -1, 2, -1, 1, -1, -1, -1]
    assert a.log[:5].tolist() == [[1, 0, 0, -1], [1, 2, 2, -1], [1, 4, 1, -1], [1, 6, -1, -1], [1, 7, -1, -1]]
    looks = 3 + 2 * 2  # a row without a slot costs ceil(3 / 32) + 1 of them
    assert state(a) == [1, looks * CANDIDATES % 3, 5, 3]


def test_the_log_is_a_ring() -> None:
    a = empty(2, 8, 8, log_events=5)
    assert len(a.log) == 8
    mirror = torch.full_like(a.table, -1)
    seen = 0
    for turn in range(6):
        for layer in range(2):
            call(a, layer, [[turn % 8, (turn + 3) % 8]])
        while seen < int(a.state[LOG_HEAD]):
            _, key, slot, evicted = a.log[seen % 8].tolist()
            if evicted >= 0:
                mirror.view(-1)[evicted] = -1
            mirror.view(-1)[key] = slot
            seen += 1
    assert seen > 16
    assert torch.equal(mirror, a.table)


def test_clock_and_log_wrap_around() -> None:
    a = empty(1, 4, 4)
    top = (1 << 31) - 1
    a.state[CLOCK], a.state[LOG_HEAD] = top, top
    a.heat[0], a.last[0] = 64 * HEAT_UNIT, top - HALF_LIFE + 1
    call(a, 0, [[0, 1]])
    assert a.state[CLOCK] == a.last[1] == -(1 << 31)
    assert a.heat[:2].tolist() == [33 * HEAT_UNIT, HEAT_UNIT]
    assert a.state[LOG_HEAD] == 2 - (1 << 31) - 1
    assert a.log[3].tolist() == [-(1 << 31), 0, 0, -1]
    assert a.log[0].tolist() == [-(1 << 31), 1, 32 % 4 + 1, -1]
    call(a, 0, [[2]])
    assert a.log[1].tolist()[:2] == [1 - (1 << 31), 2]


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3),
    experts=st.sampled_from([3, 8, 40]),
    top_k=st.integers(1, 3),
    tokens=st.integers(1, 6),
    room=st.integers(-2, 70),
    seed=st.integers(0, 1 << 30),
)
def test_what_holds_after_every_call(
    layers: int, experts: int, top_k: int, tokens: int, room: int, seed: int
) -> None:
    slots = max(1, min(experts, tokens * top_k) + room)
    absent = range(seed % 7, layers * experts, 7)
    a = over_rows(pattern_rows(layers * experts, STRIDE), layers, slots, absent=absent, seed=seed)
    flat = a.table.view(-1)
    for one in random_calls(layers, experts, top_k, tokens, 6, seed):
        before = copied(a)
        admit(a, one.layer, one.ids, one.live, one.prefill)
        copy_rows(a)
        wanted = {e for e in one.ids[: int(one.live)].flatten().tolist() if 0 <= e < experts}
        keys = {one.layer * experts + e for e in wanted}
        for key, slot in enumerate(flat.tolist()):
            assert slot == -1 or a.owners[slot] == key
            assert slot == -1 or key_in(a, slot) == key
            if key in keys and before.table.view(-1)[key] >= 0:
                assert slot == before.table.view(-1)[key], "what the call uses stays where it is"
            if key in keys and slot == -1:
                assert key in absent or slots < len(keys)
            if key not in keys:
                assert slot in (-1, int(before.table.view(-1)[key]))
                assert a.heat[key] == before.heat[key]
        assert int((flat >= 0).sum()) == int((a.owners >= 0).sum())
        new = {key for key in keys if before.table.view(-1)[key] == -1}
        assert int(a.state[LOG_HEAD] - before.state[LOG_HEAD]) == len(new)
        assert int(a.state[COPIES]) == sum(int(flat[key]) >= 0 for key in new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"owners": torch.zeros(3, dtype=torch.int32)},
            r"owners is torch.int32 \(3,\), expected int32 \(4,\)",
        ),
        ({"heat": torch.zeros(6)}, "heat is torch.float32"),
        ({"last": torch.zeros(12, dtype=torch.int32)[::2]}, "last is"),
        (
            {"log": torch.zeros(12, 4, dtype=torch.int32)},
            "log of 12 events: their number has to be a power of two",
        ),
        ({"arena": torch.zeros(6, 32, dtype=torch.uint8)}, "rows of 32 bytes for slots of 16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copied(empty(2, 3, 4), **change)


def test_a_new_state_is_empty() -> None:
    arena, pool = torch.zeros(3, STRIDE, dtype=torch.uint8), torch.zeros(5, STRIDE, dtype=torch.uint8)
    a = make_admission(2, 3, arena, pool, first=1)
    assert (a.layers, a.experts, a.slots, a.first, len(a.log)) == (2, 3, 5, 1, 8)
    assert all((t == -1).all() for t in (a.table, a.owners, a.places))
    assert all((t == 0).all() for t in (a.heat, a.last, a.state, a.log))
