"""An arena that a device reads by itself: what it is shown, and when a place may be written to again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from support.fake_moe import FakePacks
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pageable import PageableArena
from ziggurat.residency.host_cache import FillReport
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.promote import Promoter
from ziggurat.residency.policies.lru import LruPolicy

ROWS = 48


@dataclass
class Rig:
    """A cache over a real pack, and a device that has been shown `places` when its last pass was launched."""

    pack: WrappedPack
    arena: PageableArena
    cache: InlineCache
    places: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def launch(self) -> int:
        def show(places: np.ndarray, version: int) -> None:
            self.places = places.tolist()
            self.versions.append(version)

        return self.cache.launch(show)

    def fill(self, *keys: int) -> FillReport:
        return self.cache.fill([(key, 1.0) for key in keys], len(keys))

    def shown(self) -> set[int]:
        return {key for key, place in enumerate(self.places) if place >= 0}


def rig(packs: FakePacks, places: int, staging: int = 1) -> Rig:
    pack = WrappedPack(packs.open())
    arena = PageableArena(places, pack.header.stride)
    return Rig(pack, arena, InlineCache(pack, arena, LruPolicy(), experts=12, staging=staging))


@pytest.fixture
def small(packs: FakePacks) -> Iterator[Rig]:
    """Room for three rows and one read."""
    made = rig(packs, 4)
    yield made
    made.cache.check()


def test_a_pass_is_shown_what_has_arrived(small: Rig) -> None:
    small.pack.failing = {7: "io"}
    small.fill(5, 6, 7)
    small.cache.close_epoch(small.launch())
    assert small.shown() == {5, 6}
    for key in (5, 6):
        place = small.places[key]
        assert small.arena.tensor[place].any()
        assert small.cache._place_of[key] == place


def test_the_version_changes_with_what_is_shown_only(small: Rig) -> None:
    small.fill(5)
    for _ in range(2):
        small.cache.close_epoch(small.launch())
    small.cache.retire([5])
    small.cache.close_epoch(small.launch())
    same, again, changed = small.versions
    assert same == again != changed
    assert small.shown() == set()


def test_a_place_rests_until_every_pass_that_saw_it_has_finished(small: Rig) -> None:
    small.fill(1, 2, 3)
    first, second = small.launch(), small.launch()
    place = small.places[2]
    before = small.arena.tensor[place].clone()
    assert small.cache.retire([2, 9]) == 1
    later = small.launch()
    assert small.shown() == {1, 3}
    for epoch in (second, first):  # however they end
        assert small.cache.resting == 1
        assert small.fill(4).full, "no free place"
        assert small.arena.tensor[place].equal(before)
        small.cache.close_epoch(epoch)
    assert small.cache.resting == 0, "the pass that was launched afterwards does not know the place"
    assert small.fill(4).read == 1
    assert not small.arena.tensor[place].equal(before)
    small.cache.close_epoch(later)


def test_nothing_is_evicted_for_a_read_while_passes_run(small: Rig) -> None:
    small.fill(1, 2, 3)
    epoch = small.launch()
    (batch,) = small.cache.rows({9: 5.0}, epoch=small.cache.open_epoch())
    assert batch.rows[0].place not in {small.places[key] for key in (1, 2, 3)}
    assert small.cache.held() == [1, 2, 3]
    small.cache.close_epoch(epoch)


def test_rows_that_are_brought_together_do_not_evict_each_other(small: Rig) -> None:
    small.fill(1, 2, 3)
    step = small.cache.open_epoch()
    brought = small.cache.bring({10: 0.0, 11: 3.0, 12: 0.0}, epoch=step)
    assert brought.arrived == [10, 11, 12]
    assert brought.report.read == 3
    assert sorted(small.cache.held()) == [10, 11, 12]
    more = small.cache.bring({20: 1.0, 21: 1.0, 22: 1.0, 23: 1.0}, epoch=step)
    assert len(more.arrived) == 3, "there is no fourth place"
    small.cache.close_epoch(step)


def test_what_a_pass_took_from_the_arena_stays_beside_what_it_missed(packs: FakePacks) -> None:
    """Room for six rows, of which 1 to 6 are here; 2 and 3 have slots."""
    cache = rig(packs, 7).cache
    assert cache.fill([(key, 1.0) for key in range(1, 7)], 6).read == 6
    used, pooled = np.array([1, 2, 3, 20, 21]), np.array([False, True, True, True, False])
    assert cache.beside(3, used, pooled) == frozenset({1, 2, 3})
    assert cache.beside(4, used, pooled) == frozenset({1}), (
        "rows with slots may leave if there is no room for all"
    )
    assert cache.beside(5, used, pooled) == frozenset({1})
    assert cache.beside(6, used, pooled) is None
    step = cache.open_epoch()
    assert cache.bring({30: 1.0, 31: 1.0, 32: 1.0}, epoch=step, keep={1, 2, 3}).arrived == [30, 31, 32]
    assert sorted(cache.held()) == [1, 2, 3, 30, 31, 32], "they came first, and are the policy's choice"
    assert cache.promote([(40, 9.0)], lambda key: 1.0, 1).read == 0, "nor does anything else take their place"
    cache.let_go()
    assert cache.promote([(40, 9.0)], lambda key: 1.0, 1).read == 1
    cache.close_epoch(step)
    cache.check()


def test_rows_with_a_place_for_good_take_none_from_the_others(packs: FakePacks) -> None:
    cache = rig(packs, 7).cache
    cache.fix([1, 2])
    assert cache.fill([(3, 1.0), (4, 1.0)], 2).read == 2
    used, pooled = np.array([1, 2, 3, 4]), np.zeros(4, dtype=np.bool_)
    assert cache.beside(2, used, pooled) == frozenset({3, 4})
    assert cache.beside(3, used, pooled) is None


def test_rows_that_only_a_prompt_wants_are_brought_and_leave_first(small: Rig) -> None:
    small.fill(1, 2, 3)
    small.cache.touch([1, 2, 3, 9], [1.0, 0.0, 2.0, 1.0])
    step = small.cache.open_epoch()
    assert small.cache.bring({10: 0.0}, epoch=step).arrived == [10]
    assert sorted(small.cache.held()) == [1, 3, 10], "2 was used by nobody but a prompt"
    assert small.cache.bring({11: 1.0}, epoch=step).arrived == [11]
    assert sorted(small.cache.held()) == [1, 3, 11]
    small.cache.close_epoch(step)


def test_a_row_that_cannot_be_read_does_not_arrive(small: Rig) -> None:
    small.pack.failing = {8: "checksum"}
    step = small.cache.open_epoch()
    brought = small.cache.bring({7: 1.0, 8: 1.0}, epoch=step)
    assert brought.arrived == [7]
    assert [fault.key for fault in brought.report.faults] == [8]
    small.cache.close_epoch(step)


def test_a_row_that_is_copied_out_of_stays(small: Rig) -> None:
    small.fill(1)
    step = small.cache.open_epoch()
    (batch,) = small.cache.rows({1: 1.0}, epoch=step)
    assert small.cache.retire([1]) == 0
    small.cache.settle(batch)
    assert small.cache.retire([1]) == 1
    small.cache.close_epoch(step)


@pytest.mark.parametrize(
    ("places", "staging", "capacity"), [(48, 0, 48), (50, 2, 48), (49, 1, 48), (47, 4, 43)]
)
def test_an_arena_with_a_place_for_every_row_keeps_none_for_reads(
    packs: FakePacks, places: int, staging: int, capacity: int
) -> None:
    made = rig(packs, places, staging=4)
    assert (made.cache.staging, made.cache.capacity) == (staging, capacity)
    step = made.cache.open_epoch()
    for batch in made.cache.rows(dict.fromkeys(range(ROWS), 0.0), epoch=step, keep=False):
        made.cache.settle(batch)
    made.cache.close_epoch(step)
    assert made.cache.used == (ROWS if staging == 0 else 0)
    assert made.cache.full == (staging == 0)
    made.cache.check()


# -- promotion -----------------------------------------------------------------------------------------------------


def test_hotter_rows_take_the_places_of_colder_ones(small: Rig) -> None:
    heat = {1: 9.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 1.5, 6: 0.5}
    small.fill(2, 1, 3)
    report = small.cache.promote([(4, 5.0), (5, 1.5), (6, 0.5)], heat.__getitem__, 8)
    assert report.read == 1, "3 was the first to go; 1, the next one, is hotter than 5"
    assert sorted(small.cache.held()) == [1, 2, 4]


def test_a_promotion_waits_for_the_passes_that_may_read_its_place(small: Rig) -> None:
    arrived, blocked = threading.Event(), threading.Event()

    def report(found: FillReport) -> None:
        if found.read:
            arrived.set()
        elif found.full:
            blocked.set()

    small.fill(1, 2, 3)
    promoter = Promoter(small.cache, lambda key: float(key), 2, report)
    epoch = small.launch()
    promoter.want([30, 31])
    assert blocked.wait(20)
    assert small.cache.resting == 2
    assert not arrived.is_set()
    small.cache.close_epoch(epoch)
    assert arrived.wait(20)
    promoter.close()
    assert {30, 31} & set(small.cache.held())


def test_a_promoter_ends_while_it_waits(small: Rig) -> None:
    small.fill(1, 2, 3)
    promoter = Promoter(small.cache, lambda key: float(key), 2, lambda found: None)
    epoch = small.launch()
    promoter.want([30])
    promoter.close()
    small.cache.close_epoch(epoch)
    Promoter(small.cache, lambda key: 0.0, 2, lambda found: None).close()


def test_a_place_that_is_written_at_once_would_show(small: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule about resting places is what the test above is about: without it, bytes change under a pass."""
    monkeypatch.setattr(InlineCache, "_retire", lambda self, key: self._free.append(self._unbind(key)))
    small.fill(1, 2, 3)
    epoch = small.launch()
    before = small.arena.tensor[small.places[2]].clone()
    small.cache.retire([2])
    assert small.fill(4).read == 1
    assert not small.arena.tensor[small.places[2]].equal(before)
    small.cache.close_epoch(epoch)
