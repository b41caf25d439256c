"""The pool's books: table, owners, policy, free list and bytes tell one story."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.allocators.pool import CpuPool
from ziggurat.residency.policies.registry import make_policy, policy_names
from ziggurat.residency.runtime_errors import SlotError
from ziggurat.residency.slots import ABSENT, SlotPool, SlotTable

LAYERS, EXPERTS, STRIDE = 3, 5, 4096


def make(slots: int, name: str = "lru", order: list[int] | None = None) -> SlotPool:
    pool = CpuPool(slots, STRIDE)
    pool.tensor.fill_(0xFF)
    return SlotPool(pool, SlotTable(LAYERS, EXPERTS, slots, "bf16"), make_policy(name), order)


def row_of(key: int) -> torch.Tensor:
    return torch.full((STRIDE,), key, dtype=torch.uint8)


def bring(pool: SlotPool, key: int, blocked: set[int] | None = None) -> bool:
    taken = pool.take(1, blocked or set())
    if taken:
        pool.pool.write(taken, [row_of(key)])
        pool.publish(taken[0], key, 1.0)
    return bool(taken)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 6),
    name=st.sampled_from(policy_names()),
    shuffled=st.permutations(range(6)),
    ops=st.lists(
        st.tuples(st.sampled_from(["bring", "touch", "fail"]), st.integers(0, LAYERS * EXPERTS - 1)),
        max_size=40,
    ),
)
def test_invariants(slots: int, name: str, shuffled: list[int], ops: list[tuple[str, int]]) -> None:
    pool = make(slots, name, [slot for slot in shuffled if slot < slots])
    assert (pool.table.table == ABSENT).all()
    for op, key in ops:
        here = pool.table.slot_of(key) != ABSENT
        if op == "bring" and not here:
            assert bring(pool, key)
        elif op == "touch" and here:
            pool.touch({key: 1.0})
        elif op == "fail" and not here:
            pool.give_back(pool.take(2, set()))
            assert pool.table.slot_of(key) == ABSENT
        pool.check()
        assert pool.used + pool.free == slots
        for owner in pool.held():
            assert torch.equal(pool.row(owner), row_of(owner))
            layer, expert = divmod(owner, EXPERTS)
            assert pool.resident(layer, np.array([expert]))[0]


def test_blocked_keys_keep_their_slots() -> None:
    pool = make(3)
    for key in (0, 1, 2):
        bring(pool, key)
    assert len(pool.take(3, {0, 2})) == 1
    assert pool.table.slot_of(1) == ABSENT
    assert set(pool.held()) == {0, 2}
    assert pool.evictions == 1


def test_a_row_cannot_be_found_before_it_is_published() -> None:
    pool = make(1)
    bring(pool, 4)
    taken = pool.take(1, set())
    assert pool.table.slot_of(4) == ABSENT, "the victim's bytes are being overwritten"
    pool.pool.write(taken, [row_of(9)])
    assert pool.table.slot_of(9) == ABSENT
    pool.publish(taken[0], 9, 1.0)
    assert torch.equal(pool.row(9), row_of(9))


def test_misuse_is_refused() -> None:
    pool = make(2)
    with pytest.raises(SlotError, match="had not been taken"):
        pool.publish(0, 3, 1.0)
    bring(pool, 3)
    taken = pool.take(1, set())
    with pytest.raises(SlotError, match="already has slot"):
        pool.publish(taken[0], 3, 1.0)
    pool.give_back(taken)
    with pytest.raises(SlotError, match="had not been taken"):
        pool.give_back(taken)
    with pytest.raises(SlotError, match="row 8 was read but has no slot"):
        pool.row(8)
    with pytest.raises(SlotError, match="permutation"):
        make(3, order=[0, 1, 1])
    with pytest.raises(SlotError, match="2 slots, the pool has 3"):
        SlotPool(CpuPool(3, STRIDE), SlotTable(LAYERS, EXPERTS, 2, "w2"), make_policy("lru"))


def test_check_finds_books_that_disagree() -> None:
    pool = make(2)
    bring(pool, 3)
    pool.table.numpy[0, 3] = 1
    with pytest.raises(SlotError, match="table entry says otherwise"):
        pool.check()


def test_two_pools_share_nothing_and_know_their_codec() -> None:
    base, better = make(2), make(2)
    better.table.codec = "fp4"
    bring(base, 3)
    assert better.table.slot_of(3) == ABSENT
    assert (base.table.codec, better.table.codec) == ("bf16", "fp4")


def test_free_slots_are_handed_out_in_the_given_order() -> None:
    assert make(4, order=[2, 0, 3, 1]).take(4, set()) == [2, 0, 3, 1]
