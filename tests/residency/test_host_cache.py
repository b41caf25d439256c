"""The arena as a cache over the pack: what may be found, what may be displaced, and when a place is free."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fake_moe import FakePacks
from support.page_cache import PAGE, drop, resident
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pageable import PageableArena
from ziggurat.residency.host_cache import HostCache, RowBatch
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.runtime_errors import HostCacheError
from ziggurat.stores.pack import Pack, RowRequest
from ziggurat.stores.readers.pread import PreadReader

ROWS = 48


class Rig:
    """A cache over a real pack; its arena is full of NaN bytes."""

    def __init__(self, packs: FakePacks, places: int, staging: int, policy: str = "lru") -> None:
        self.pack = WrappedPack(packs.open())
        self.arena = PageableArena(places, self.pack.header.stride)
        self.arena.tensor.fill_(0xFF)
        self.cache = HostCache(
            self.pack, self.arena, make_policy(policy), experts=packs.geometry.experts, staging=staging
        )
        self.truth = read_all(packs)

    def get(self, keys: Iterable[int], weight: float = 1.0, **options: Any) -> dict[int, str]:
        """Read and settle rows, checking every byte; key -> source, or the reason of its failure."""
        epoch = self.cache.open_epoch()
        found: dict[int, str] = {}
        for batch in self.cache.rows(dict.fromkeys(keys, weight), epoch=epoch, **options):
            self.check(batch)
            found |= {row.key: row.source for row in batch.rows}
            found |= {fault.key: fault.reason for fault in batch.faults}
            self.cache.settle(batch)
        self.cache.close_epoch(epoch)
        self.cache.check()
        return found

    def check(self, batch: RowBatch) -> None:
        for row in batch.rows:
            assert torch.equal(row.row, self.truth[row.key]), f"row {row.key} has foreign bytes"


def read_all(packs: FakePacks) -> torch.Tensor:
    """Every row of the pack, uint8 [ROWS, stride]."""
    pack = packs.open()
    arena = PageableArena(ROWS, pack.header.stride)
    wanted = [RowRequest(*packs.geometry.split(key), arena.view(key)) for key in range(ROWS)]
    assert all(result.error is None for result in pack.read_rows(wanted))
    pack.close()
    return arena.tensor


def test_a_row_is_read_once_and_found_after_that(packs: FakePacks) -> None:
    rig = Rig(packs, places=8, staging=2)
    assert rig.get([1, 7, 30]) == {1: "pack", 7: "pack", 30: "pack"}
    assert rig.get([7, 30, 2]) == {7: "arena", 30: "arena", 2: "pack"}
    assert rig.pack.log == [1, 7, 30, 2]
    assert (rig.cache.used, rig.cache.capacity, rig.cache.evictions) == (4, 6, 0)


def test_a_full_cache_evicts_by_policy(packs: FakePacks) -> None:
    rig = Rig(packs, places=4, staging=1)
    rig.get([1, 2, 3])
    rig.get([1])
    rig.get([4])
    assert [rig.cache.holds(key) for key in (1, 2, 3, 4)] == [True, False, True, True]
    assert rig.cache.evictions == 1


def test_evictions_do_not_depend_on_the_order_of_arrival(packs: FakePacks) -> None:
    orders = []
    for backwards in (False, True):
        rig = Rig(packs, places=8, staging=1)
        rig.pack.backwards = backwards
        rig.get([5, 9, 1, 7])
        orders.append(rig.cache.policy.order())
    assert orders == [[7, 1, 9, 5]] * 2


def test_more_rows_than_places_go_through_in_rounds(packs: FakePacks) -> None:
    rig = Rig(packs, places=3, staging=1)
    assert set(rig.get(range(20)).values()) == {"pack"}
    assert rig.pack.log == list(range(20))


def test_an_arena_of_staging_places_only_keeps_nothing(packs: FakePacks) -> None:
    rig = Rig(packs, places=2, staging=8)
    assert rig.cache.capacity == 0
    assert set(rig.get(range(9)).values()) == {"pack"}
    assert set(rig.get(range(9)).values()) == {"pack"}
    assert rig.cache.used == 0


# -- publish after arrival -----------------------------------------------------------------------------------------


def test_a_key_is_not_findable_before_its_bytes_arrived(packs: FakePacks) -> None:
    rig = Rig(packs, places=4, staging=1)
    seen = []
    rig.pack.before = lambda key: seen.append(rig.cache.holds(key))
    rig.get([1, 2])
    assert seen == [False, False]
    assert rig.cache.holds(1)
    assert rig.cache.holds(2)


@pytest.mark.parametrize("kind", ["io", "checksum"])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_failed_read_never_becomes_a_hit(packs: FakePacks, kind: str, weight: float) -> None:
    rig = Rig(packs, places=6, staging=2)
    rig.pack.failing[5] = kind
    assert rig.get([4, 5], weight) == {4: "pack", 5: f"injected {kind} failure"}
    assert not rig.cache.holds(5)
    assert rig.get([5], weight) == {5: f"injected {kind} failure"}
    rig.pack.failing.clear()
    assert rig.get([5], weight) == {5: "pack"}, "the place of the failed read must be usable again"


def test_a_fault_says_whether_verification_failed(packs: FakePacks) -> None:
    rig = Rig(packs, places=4, staging=1)
    rig.pack.failing = {1: "io", 2: "checksum"}
    epoch = rig.cache.open_epoch()
    faults = [fault for batch in rig.cache.rows({1: 1.0, 2: 1.0}, epoch=epoch) for fault in batch.faults]
    assert {fault.key: fault.verification for fault in faults} == {1: False, 2: True}


# -- scan discipline -----------------------------------------------------------------------------------------------


def test_a_scan_fills_free_places_but_never_evicts(packs: FakePacks) -> None:
    rig = Rig(packs, places=6, staging=2)
    rig.get([1, 2])
    rig.get(range(10, 20), weight=0.0)
    assert rig.cache.holds(1)
    assert rig.cache.holds(2)
    assert rig.cache.used == 4, "two free places were filled"
    assert rig.cache.evictions == 0
    rig.get(range(30, 40), weight=0.0)
    assert rig.cache.holds(1)
    assert rig.cache.evictions == 0


def test_rows_of_a_scan_are_the_first_to_leave(packs: FakePacks) -> None:
    rig = Rig(packs, places=5, staging=1)
    rig.get([1, 2])
    rig.get([10, 11], weight=0.0)
    rig.get([3, 4])
    assert [key for key in range(ROWS) if rig.cache.holds(key)] == [1, 2, 3, 4]


def test_keep_false_leaves_no_trace(packs: FakePacks) -> None:
    rig = Rig(packs, places=6, staging=2)
    rig.get(range(5), keep=False)
    assert rig.cache.used == 0


# -- epochs --------------------------------------------------------------------------------------------------------


def test_a_place_that_a_step_in_flight_may_read_is_not_reused(packs: FakePacks) -> None:
    rig = Rig(packs, places=2, staging=1)
    first = rig.cache.open_epoch()
    held = list(rig.cache.rows({1: 1.0}, epoch=first))  # copied asynchronously: not settled
    assert rig.get([2]) == {2: "pack"}
    for batch in held:
        rig.check(batch)
    assert rig.cache.holds(1), "its place is in use, so row 2 had to go through staging"
    rig.cache.close_epoch(first)
    rig.get([2])
    assert rig.cache.holds(2)
    assert not rig.cache.holds(1)


def test_a_hit_protects_its_place_as_a_read_does(packs: FakePacks) -> None:
    rig = Rig(packs, places=2, staging=1)
    rig.get([1])
    epoch = rig.cache.open_epoch()
    held = list(rig.cache.rows({1: 1.0}, epoch=epoch))
    assert held[0].rows[0].source == "arena"
    rig.get([2])
    rig.check(held[0])
    rig.cache.close_epoch(epoch)


def test_a_place_read_by_two_steps_waits_for_both(packs: FakePacks) -> None:
    rig = Rig(packs, places=2, staging=1)
    first, second = rig.cache.open_epoch(), rig.cache.open_epoch()
    list(rig.cache.rows({1: 1.0}, epoch=first))
    list(rig.cache.rows({1: 1.0}, epoch=second))
    rig.cache.close_epoch(second)
    rig.get([2])
    assert rig.cache.holds(1)
    rig.cache.close_epoch(first)
    rig.get([2])
    assert not rig.cache.holds(1)


def test_a_request_waits_until_another_step_gives_its_places_back(packs: FakePacks) -> None:
    rig = Rig(packs, places=2, staging=1)
    first = rig.cache.open_epoch()
    held = list(rig.cache.rows({1: 1.0, 2: 1.0}, epoch=first))
    results: list[dict[int, str]] = []
    thread = threading.Thread(target=lambda: results.append(rig.get([3])))
    thread.start()
    with rig.cache._changed:
        assert rig.cache._changed.wait_for(lambda: rig.cache.waits > 0, timeout=60)
    for batch in held:
        rig.check(batch)
    assert rig.pack.log == [1, 2], "nothing may be read while no place is free"
    rig.cache.close_epoch(first)
    thread.join()
    assert results == [{3: "pack"}]


def test_a_step_that_holds_every_place_is_told_so_instead_of_waiting_for_itself(packs: FakePacks) -> None:
    rig = Rig(packs, places=2, staging=1)
    epoch = rig.cache.open_epoch()
    with pytest.raises(HostCacheError, match=r"tiers\.host\.size"):
        for _ in rig.cache.rows(dict.fromkeys(range(5), 1.0), epoch=epoch):
            pass
    rig.cache.close_epoch(epoch)
    assert rig.get(range(5)) == {0: "arena"} | dict.fromkeys(range(1, 5), "pack")


def test_an_abandoned_request_gives_every_place_back(packs: FakePacks) -> None:
    rig = Rig(packs, places=6, staging=2)
    epoch = rig.cache.open_epoch()
    rows = rig.cache.rows(dict.fromkeys(range(6), 1.0), epoch=epoch)
    next(rows)
    rows.close()
    rig.cache.close_epoch(epoch)
    rig.cache.check()
    assert rig.get(range(6)).keys() == set(range(6))


def test_a_step_that_can_evict_nothing_asks_once_and_not_for_each_row(
    packs: FakePacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(packs, places=12, staging=2)
    rig.get(range(10))
    epoch = rig.cache.open_epoch()
    held = list(rig.cache.rows(dict.fromkeys(range(10), 1.0), epoch=epoch))
    asked: list[int | None] = []
    victim = rig.cache.policy.victim

    def note(blocked: Container[int]) -> int | None:
        asked.append(victim(blocked))
        return asked[-1]

    monkeypatch.setattr(rig.cache.policy, "victim", note)
    rounds = 0
    for batch in rig.cache.rows(dict.fromkeys(range(20, 44), 1.0), epoch=epoch):
        rounds += 1
        rig.cache.settle(batch)
    assert rounds == 24, "staging brought all of them, two at a time"
    assert asked == [None] * 12
    for batch in held:
        rig.check(batch)
    rig.cache.close_epoch(epoch)


# -- background fill -----------------------------------------------------------------------------------------------


def test_fill_takes_free_places_only_and_says_when_none_is_left(packs: FakePacks) -> None:
    rig = Rig(packs, places=5, staging=2)
    rig.get([1])
    report = rig.cache.fill([(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)], limit=2)
    assert (report.read, report.full) == (2, False)
    report = rig.cache.fill([(4, 6.0)], limit=2)
    assert (report.read, report.full) == (0, True)
    assert [key for key in range(ROWS) if rig.cache.holds(key)] == [1, 2, 3]
    assert rig.cache.evictions == 0
    assert rig.get([2]) == {2: "arena"}


def test_fill_does_not_publish_a_failed_row(packs: FakePacks) -> None:
    rig = Rig(packs, places=5, staging=1)
    rig.pack.failing[2] = "io"
    report = rig.cache.fill([(1, 2.0), (2, 1.0)], limit=8)
    assert report.read == 1
    assert [fault.key for fault in report.faults] == [2]
    assert not rig.cache.holds(2)
    rig.cache.check()


@pytest.mark.parametrize("policy", ["lru", "lfu-decay"])
def test_filled_rows_leave_coldest_first(packs: FakePacks, policy: str) -> None:
    rig = Rig(packs, places=5, staging=1, policy=policy)
    rig.cache.fill([(7, 9.0), (3, 5.0), (5, 2.0), (1, 0.5)], limit=4)
    rig.get([20], weight=4.0)
    rig.get([21], weight=4.0)
    assert [key for key in (7, 3, 5, 1) if rig.cache.holds(key)] == [7, 3]


def test_a_step_waits_for_a_row_that_the_background_is_reading(packs: FakePacks) -> None:
    rig = Rig(packs, places=5, staging=1)
    arrived, go = threading.Event(), threading.Event()

    def gate(key: int) -> None:
        arrived.set()
        go.wait()

    rig.pack.before = gate
    filler = threading.Thread(target=lambda: rig.cache.fill([(1, 1.0)], limit=1))
    filler.start()
    arrived.wait()
    results: list[dict[int, str]] = []
    step = threading.Thread(target=lambda: results.append(rig.get([1])))
    step.start()
    with rig.cache._changed:
        assert rig.cache._changed.wait_for(lambda: rig.cache.waits > 0, timeout=60)
    go.set()
    filler.join()
    step.join()
    assert results == [{1: "arena"}]
    assert rig.pack.log == [1]


def test_a_row_that_the_background_brings_between_two_looks_is_not_read_again(
    packs: FakePacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(packs, places=5, staging=1)
    look = rig.cache._find

    def look_too_early(remaining: dict[int, float], epoch: int) -> RowBatch:
        found = look(remaining, epoch)
        rig.cache.fill([(1, 1.0)], limit=1)
        return found

    monkeypatch.setattr(rig.cache, "_find", look_too_early)
    assert rig.get([1, 2]) == {1: "arena", 2: "pack"}
    assert rig.pack.log == [1, 2]


# -- all of it -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    places=st.integers(1, 8),
    staging=st.integers(1, 3),
    policy=st.sampled_from(["lru", "lfu-decay"]),
    requests=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from([0.0, 1.0, 3.0]), max_size=10),
            st.sets(st.integers(0, ROWS - 1), max_size=20),
            st.booleans(),
        ),
        max_size=8,
    ),
)
def test_any_sequence_of_requests(
    packs: FakePacks,
    places: int,
    staging: int,
    policy: str,
    requests: list[tuple[dict[int, float], set[int], bool]],
) -> None:
    rig = Rig(packs, places, staging, policy)
    for wanted, failing, keep in requests:
        rig.pack.failing = dict.fromkeys(failing, "io")
        held = {key for key in wanted if rig.cache.holds(key)}
        epoch = rig.cache.open_epoch()
        arrived, faults = [], []
        for batch in rig.cache.rows(wanted, epoch=epoch, keep=keep):
            rig.check(batch)
            arrived += [row.key for row in batch.rows]
            faults += [fault.key for fault in batch.faults]
            rig.cache.settle(batch)
        rig.cache.close_epoch(epoch)
        rig.cache.advance()
        rig.cache.check()
        assert sorted(arrived + faults) == sorted(wanted)
        assert set(faults) == (wanted.keys() & failing) - held
        for key in range(ROWS):
            if rig.cache.holds(key):
                assert rig.get([key]) == {key: "arena"}


def test_what_cannot_work_is_refused(packs: FakePacks) -> None:
    with pytest.raises(HostCacheError, match="0 for staging"):
        Rig(packs, places=2, staging=0)
    pack = packs.open()
    with pytest.raises(HostCacheError, match="stride"):
        HostCache(pack, PageableArena(2, pack.header.stride * 2), make_policy("lru"), experts=12, staging=1)


def test_what_the_arena_keeps_is_not_kept_by_the_page_cache(packs: FakePacks, tmp_path: Path) -> None:
    copy = Path(shutil.copy(packs.paths[0], tmp_path))
    if not drop(copy):
        pytest.skip("the filesystem of the temporary folder has nothing but the page cache")
    pack = Pack.open(copy, reader=PreadReader(copy, direct="never"))
    cache = HostCache(pack, PageableArena(40, pack.header.stride), make_policy("lru"), experts=12, staging=4)
    drop(copy)

    def pages(key: int) -> int:
        return resident(copy, pack._data_start + pack.header.row_offset(*divmod(key, 12)), pack.header.stride)

    def get(keys: range, keep: bool) -> None:
        epoch = cache.open_epoch()
        for batch in cache.rows(dict.fromkeys(keys, 1.0), epoch=epoch, keep=keep):
            cache.settle(batch)
        cache.close_epoch(epoch)

    get(range(30, 34), keep=False)
    assert all(pages(key) == pack.header.stride // PAGE for key in range(30, 34)), "the only copy"
    get(range(24), keep=True)
    assert [key for key in range(24) if cache.holds(key) and pages(key)] == []
    pack.close()
