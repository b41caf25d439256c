"""Rows that are read before anybody waits for them, by the threads of a service."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, tiers
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pageable import PageableArena
from ziggurat.residency.host_cache import FillReport, HostCache
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.read_ahead import EVERY_STEPS, MOST_BATCHES, EarlyReader, HeatReader

ROWS = 48


class Rig:
    """A cache over a real pack, whose reads stop at a gate while it is shut; its heat: the key, or what a test says."""

    def __init__(self, packs: FakePacks, places: int, staging: int = 1) -> None:
        self.pack = WrappedPack(packs.open())
        arena = PageableArena(places, self.pack.header.stride)
        self.cache = HostCache(self.pack, arena, make_policy("lru"), experts=12, staging=staging)
        self.reading, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.pack.before = self._before
        self.reports: list[FillReport] = []
        self.told = threading.Condition()

    def _before(self, key: int) -> None:
        self.reading.set()
        self.gate.wait()

    def report(self, report: FillReport) -> None:
        with self.told:
            self.reports.append(report)
            self.told.notify_all()

    def await_reports(self, count: int) -> None:
        with self.told:
            assert self.told.wait_for(lambda: len(self.reports) >= count, timeout=60)

    def hottest(self, count: int) -> list[tuple[int, float]]:
        absent = [key for key in reversed(range(ROWS)) if not self.cache.holds(key)]
        return [(key, float(key)) for key in absent[:count]]

    def get(self, keys: range, weight: float = 1.0) -> None:
        epoch = self.cache.open_epoch()
        for batch in self.cache.rows(dict.fromkeys(keys, weight), epoch=epoch):
            self.cache.settle(batch)
        self.cache.close_epoch(epoch)


@pytest.fixture
def rig(packs: FakePacks) -> Iterator[Rig]:
    made = Rig(packs, places=13)
    yield made
    made.gate.set()
    made.cache.check()


@pytest.fixture
def by_heat(rig: Rig) -> Iterator[HeatReader]:
    reader = HeatReader(rig.cache, rig.hottest, float, 2, rig.report)
    yield reader
    rig.gate.set()
    reader.close()


# -- by heat -------------------------------------------------------------------------------------------------------


def test_after_so_many_steps_the_hottest_rows_fill_free_places(rig: Rig, by_heat: HeatReader) -> None:
    rig.get(range(8))
    by_heat.passed(EVERY_STEPS - 1)
    assert rig.reports == []
    by_heat.passed(1)
    rig.await_reports(3)
    assert [report.read for report in rig.reports[:3]] == [2, 2, 0], "four free places, and then it stops"
    assert sorted(rig.cache.held()) == [*range(8), 44, 45, 46, 47]
    assert rig.cache.evictions == 0


def test_a_scans_rows_give_way_and_used_ones_do_not(rig: Rig, by_heat: HeatReader) -> None:
    rig.get(range(6))
    rig.get(range(10, 16), weight=0.0)
    by_heat.passed(EVERY_STEPS)
    rig.await_reports(4)
    assert sorted(rig.cache.held()) == [*range(6), *range(42, 48)]


def test_one_look_reads_a_bounded_number_of_rows(packs: FakePacks) -> None:
    rig = Rig(packs, places=40)
    reader = HeatReader(rig.cache, rig.hottest, float, 2, rig.report)
    reader.passed(EVERY_STEPS)
    rig.await_reports(MOST_BATCHES)
    with reader._changed:
        assert reader._changed.wait_for(lambda: not reader._working, timeout=60)
    assert sum(report.read for report in rig.reports) == 2 * MOST_BATCHES
    reader.passed(EVERY_STEPS)
    rig.await_reports(2 * MOST_BATCHES)
    reader.close()


def test_nothing_is_read_where_nothing_can_be_replaced(rig: Rig, by_heat: HeatReader) -> None:
    rig.get(range(12))
    by_heat.passed(10 * EVERY_STEPS)
    assert by_heat._thread.ident is None, "not even a thread"


def test_it_waits_while_a_step_reads(rig: Rig, by_heat: HeatReader) -> None:
    rig.get(range(2))
    rig.gate.clear()
    rig.reading.clear()
    step = threading.Thread(target=lambda: rig.get(range(20, 22)))
    step.start()
    rig.reading.wait()
    waited = threading.Event()

    def wait() -> None:
        rig.cache.wait_until_idle(lambda: False)
        waited.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not waited.is_set()
    rig.gate.set()
    step.join()
    waiter.join()
    assert waited.is_set()


def test_it_can_be_held_and_ended(rig: Rig, by_heat: HeatReader) -> None:
    with by_heat.paused():
        by_heat.passed(EVERY_STEPS)
        assert rig.reports == []
    rig.await_reports(1)
    by_heat.close()
    by_heat.passed(10 * EVERY_STEPS)
    by_heat.close()


# -- ahead of a scan -----------------------------------------------------------------------------------------------


def test_what_comes_next_is_read_into_places_that_nobody_needs(packs: FakePacks) -> None:
    rig = Rig(packs, places=12, staging=8)
    rig.get(range(4))
    rig.pack.log.clear()
    reader = EarlyReader(rig.cache, 4, rig.report)
    reader.want(range(20, 40))
    rig.await_reports(1)
    assert rig.pack.log == [20, 21, 22, 23], "half of the places"
    rig.get(range(20, 22), weight=0.0)
    assert rig.pack.log == [20, 21, 22, 23]
    reader.want(range(22, 42))
    rig.await_reports(2)
    assert rig.pack.log == [20, 21, 22, 23, 24, 25]
    reader.want(())
    rig.get(range(22, 24), weight=0.0)
    assert rig.pack.log[-2:] == [22, 23], "the pass is over, its rows are forgotten"
    reader.close()
    rig.cache.check()


def test_a_pass_ends_behind_the_read_in_progress(packs: FakePacks) -> None:
    rig = Rig(packs, places=12, staging=8)
    reader = EarlyReader(rig.cache, 4, rig.report)
    rig.gate.clear()
    reader.want(range(20, 22))
    rig.reading.wait()
    ended = threading.Thread(target=lambda: reader.want(()))
    ended.start()
    rig.gate.set()
    ended.join()
    assert len(rig.reports) == 1
    rig.cache.check()
    reader.close()


def test_rows_of_the_arena_and_an_arena_without_room_start_no_thread(packs: FakePacks) -> None:
    rig = Rig(packs, places=12, staging=8)
    rig.get(range(4))
    reader = EarlyReader(rig.cache, 4, rig.report)
    reader.want(range(4))
    reader.want(())
    assert reader._thread.ident is None
    small = EarlyReader(Rig(packs, places=3).cache, 1, rig.report)
    small.want(range(9))
    assert small._thread.ident is None
    for one in (reader, small):
        one.close()
        one.want(range(9))


# -- in a service --------------------------------------------------------------------------------------------------


def test_prompts_and_steps_of_a_service_read_ahead_and_give_the_same_bits(
    packs: FakePacks, model: FakeModel
) -> None:
    with tiers(packs, slots=6, places=20, on_device=True, miss={"mode": "replay"}) as service:
        run = Passes(model, service)
        for step in range(6):
            long = step % 2 == 1
            x = model.inputs(40 if long else 2, seed=step)
            tokens = StepTokens(40, np.ones(40, dtype=np.bool_), eager=True) if long else None
            assert bits_equal(run.step(x, tokens).value, packs.reference(model, x))
            service.cache.check()
        service._ahead.passed(EVERY_STEPS)
        with service.paused():
            pass
        metric = service.metrics.value
        early = metric("ziggurat_read_ahead_rows_total", "layers")
        assert metric("ziggurat_read_ahead_used_rows_total") <= early + metric(
            "ziggurat_read_ahead_rows_total", "heat"
        )


def test_the_hottest_rows_are_those_that_neither_pool_nor_arena_has(
    packs: FakePacks, model: FakeModel
) -> None:
    with tiers(packs, slots=6, places=20, on_device=True, miss={"mode": "replay"}) as service:
        service.heat.counts[:] = np.arange(ROWS).reshape(4, 12)
        assert service._ahead.hottest(3) == [(47, 47.0), (46, 46.0), (45, 45.0)]
        Passes(model, service).step(model.inputs(3))
        here = set(service.slots.held()) | set(service.cache.held())
        counts = service.heat.counts.reshape(-1)
        wanted = sorted(set(range(ROWS)) - here, key=lambda key: (-counts[key], key))
        found = service._ahead.hottest(ROWS)
        assert [key for key, _ in found] == [key for key in wanted if counts[key] > 0]
        assert here
        service.heat.counts[:] = 0.0
        assert service._ahead.hottest(5) == []
