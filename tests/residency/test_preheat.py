"""The background thread: it fills, it pauses when told to, it ends when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from support.fake_moe import FakePacks
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pageable import PageableArena
from ziggurat.residency.host_cache import FillReport, HostCache
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.preheat import Preheater

ORDER = [(key, 100.0 - key) for key in range(20)]


class Rig:
    """A preheater over a real pack whose reads stop at a gate while `gated` is set."""

    def __init__(self, packs: FakePacks, places: int, batch: int = 2) -> None:
        self.pack = WrappedPack(packs.open())
        arena = PageableArena(places + 1, self.pack.header.stride)
        self.cache = HostCache(self.pack, arena, make_policy("lru"), experts=12, staging=1)
        self.reports: list[FillReport] = []
        self.reading, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.pack.before = self._before
        self.preheater = Preheater(self.cache, ORDER, batch, self.reports.append)

    def _before(self, key: int) -> None:
        self.reading.set()
        self.gate.wait()


@pytest.fixture
def rig(packs: FakePacks) -> Iterator[Rig]:
    rig = Rig(packs, places=8)
    yield rig
    rig.gate.set()
    rig.preheater.close()


def test_it_fills_the_hottest_rows_and_stops_when_full(rig: Rig) -> None:
    rig.preheater.start()
    rig.preheater.wait()
    assert [key for key in range(48) if rig.cache.holds(key)] == list(range(8))
    assert sum(report.read for report in rig.reports) == 8
    assert rig.reports[-1].full
    assert rig.cache.evictions == 0


def test_it_ends_when_everything_wanted_is_there(packs: FakePacks) -> None:
    rig = Rig(packs, places=30)
    rig.preheater.start()
    rig.preheater.wait()
    assert rig.cache.used == 20


def test_pausing_waits_for_the_batch_in_progress_and_no_other_begins(rig: Rig) -> None:
    rig.gate.clear()
    rig.preheater.start()
    rig.reading.wait()
    entered = threading.Event()
    log: list[str] = []

    def capture() -> None:
        with rig.preheater.paused():
            entered.set()
            log.append(f"captured after {len(rig.reports)} batches, reads {rig.pack.log}")

    thread = threading.Thread(target=capture)
    thread.start()
    assert not entered.is_set(), "a read is in progress: the capture must wait"
    rig.gate.set()
    thread.join()
    assert entered.is_set()
    finished = len(rig.reports)
    assert log[0].startswith("captured after")
    assert finished >= 1
    rig.preheater.wait()
    assert rig.cache.used == 8


def test_nothing_is_read_while_paused(rig: Rig) -> None:
    with rig.preheater.paused(), rig.preheater.paused():
        rig.preheater.start()
        rig.preheater._changed.acquire()  # let the thread reach its wait; it needs this lock to begin a batch
        rig.preheater._changed.release()
        assert rig.pack.log == []
        assert not rig.preheater._working
    rig.preheater.wait()
    assert rig.cache.used == 8


def test_leaving_an_inner_pause_does_not_end_the_outer_one(rig: Rig) -> None:
    with rig.preheater.paused():
        with rig.preheater.paused():
            pass
        assert rig.preheater._pauses == 1
    assert rig.preheater._pauses == 0


def test_closing_stops_after_the_batch_in_progress(rig: Rig) -> None:
    rig.gate.clear()
    rig.preheater.start()
    rig.reading.wait()
    closer = threading.Thread(target=rig.preheater.close)
    with rig.preheater._changed:
        closer.start()
        rig.preheater._changed.wait_for(lambda: rig.preheater._stop)
    rig.gate.set()
    closer.join()
    assert not rig.preheater._thread.is_alive()
    assert len(rig.reports) == 1
    rig.preheater.close()
    rig.cache.check()


def test_closing_ends_a_paused_thread(rig: Rig) -> None:
    with rig.preheater.paused():
        rig.preheater.start()
        rig.preheater.close()
    assert rig.pack.log == []


def test_closing_before_the_start_is_fine(rig: Rig) -> None:
    rig.preheater.close()


def test_failed_rows_are_reported_and_skipped(rig: Rig) -> None:
    rig.pack.failing = {0: "io", 3: "checksum"}
    rig.preheater.start()
    rig.preheater.wait()
    assert {fault.key for report in rig.reports for fault in report.faults} == {0, 3}
    assert [key for key in range(48) if rig.cache.holds(key)] == [1, 2, 4, 5, 6, 7, 8, 9]
