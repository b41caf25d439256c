"""Reads that do not return: their places are nobody's until they do, and everything else goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, tiers
from support.host_rig import ROWS, Rig
from support.keepers import keeper
from ziggurat.allocators.shared.arena import attach_arena
from ziggurat.allocators.shared.messages import Attach
from ziggurat.residency.host_cache import HostCache, RowFault
from ziggurat.residency.ledger import arena_key, arena_label, open_ledger
from ziggurat.residency.policies.registry import make_policy
from ziggurat.stores.pack import Pack
from ziggurat.stores.readers.pread import PreadReader

LIMIT = 0.2
THREADS = 4
FOREIGN = 0xEE


class DeadDisk:
    """A pack of which chosen rows do not answer; when they do, they bring bytes that are nobody's."""

    def __init__(self, packs: FakePacks, timeout: float | None = LIMIT) -> None:
        self.dead: set[int] | None = set()  # keys; None = all
        self._answered = threading.Event()
        path = packs.paths[0]
        reader = PreadReader(path, threads=THREADS, timeout=timeout, preadv=self._preadv)
        self.pack = Pack.open(path, reader=reader)
        self._experts = packs.geometry.experts

    def answer(self) -> None:
        self.dead = set()
        self._answered.set()
        self._answered = threading.Event()

    def _preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        header = self.pack.header
        first = (offset - self.pack._data_start) // header.stride
        keys = range(first, first + max(1, sum(map(len, buffers)) // header.stride))
        if self.dead is None or not self.dead.isdisjoint(keys):
            assert self._answered.wait(60)
            for buffer in buffers:
                buffer[:] = bytes([FOREIGN]) * len(buffer)
            return sum(map(len, buffers))
        return os.preadv(fd, buffers, offset)


@pytest.fixture
def disk(packs: FakePacks) -> Iterator[DeadDisk]:
    made = DeadDisk(packs)
    yield made
    made.answer()
    made.pack.close()


def rig_on(packs: FakePacks, disk: DeadDisk, places: int, staging: int) -> Rig:
    rig = Rig(packs, places, staging)
    rig.pack.close()
    rig.cache = HostCache(
        disk.pack, rig.arena, make_policy("lru"), experts=packs.geometry.experts, staging=staging
    )
    return rig


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["used", "a scan's"])
def test_a_place_that_may_still_be_written_to_is_nobodys(
    packs: FakePacks, disk: DeadDisk, weight: float
) -> None:
    rig = rig_on(packs, disk, places=4, staging=2)
    disk.dead = {7}
    found = rig.get([7], weight)
    assert "has not returned in 0.2 s" in found[7]
    assert (rig.cache.stuck, rig.cache.holds(7)) == (1, False)
    # Every other row goes through the places that are left, whose bytes are checked by the rig.
    others = [key for key in range(ROWS) if key != 7]
    assert set(rig.get(others).values()) == {"pack"}
    held = rig.cache.held()
    before = rig.arena.tensor.clone()
    disk.answer()
    wait_until(lambda: not rig.cache.stuck)
    changed = (rig.arena.tensor != before).any(1).nonzero().flatten().tolist()
    assert len(changed) == 1  # the late bytes came, and to a place of which nobody knew
    assert rig.arena.tensor[changed[0]].eq(FOREIGN).all()
    assert rig.cache.held() == held
    assert set(rig.get(held).values()) == {"arena"}
    assert rig.get([7], weight) == {7: "pack"}
    assert set(rig.get(range(ROWS), weight)) == set(range(ROWS))


def test_without_a_place_left_rows_fail_and_come_back(packs: FakePacks, disk: DeadDisk) -> None:
    rig = rig_on(packs, disk, places=2, staging=2)
    disk.dead = None
    for key in (3, 20):
        assert "has not returned" in rig.get([key])[key]
    assert rig.cache.stuck == 2
    begun = time.monotonic()
    found = rig.get(range(ROWS))
    assert time.monotonic() - begun < 5
    assert len(found) == ROWS
    assert all("2 of 2 places of the host arena wait for reads" in reason for reason in found.values())
    disk.answer()
    wait_until(lambda: not rig.cache.stuck)
    assert set(rig.get(range(ROWS)).values()) == {"pack"}


def test_what_is_read_ahead_waits_no_longer(packs: FakePacks, disk: DeadDisk) -> None:
    rig = rig_on(packs, disk, places=12, staging=2)
    disk.dead = None
    report = rig.cache.fill([(key, 1.0) for key in range(0, 12, 2)], 6)
    assert (report.read, len(report.faults)) == (0, 6)
    assert 1 <= rig.cache.stuck <= THREADS
    rig.cache.check()
    disk.answer()
    wait_until(lambda: not rig.cache.stuck)
    report = rig.cache.fill([(key, 1.0) for key in range(0, 20, 2)], 10)
    assert report.read == 10  # also in the places that were stuck
    rig.cache.check()


def test_late_bytes_change_nothing_after_the_end(packs: FakePacks, disk: DeadDisk) -> None:
    rig = rig_on(packs, disk, places=4, staging=1)
    disk.dead = {9}
    rig.get([9])
    free = list(rig.cache._free)
    rig.cache.close()
    disk.answer()
    wait_until(lambda: not rig.cache.stuck)
    assert rig.cache._free == free


@pytest.mark.parametrize("mode", ["inline", "replay"])
def test_a_service_on_a_disk_that_hangs(packs: FakePacks, model: FakeModel, mode: str) -> None:
    x = model.inputs(6)
    wanted = packs.reference(model, x)
    disk = DeadDisk(packs)
    disk.dead = None
    with tiers(packs, slots=48, miss={"mode": mode}, pack=disk.pack) as service:
        run = Passes(model, service)
        result = run.step(x)
        assert result.outcome == "failed"
        assert "not returned" in str(result.failures[0])
        assert service.metrics.value("ziggurat_failed_reads_total", "timeout") > 0
        assert service.metrics.value("ziggurat_failed_reads_total", "io") == 0
        assert service.metrics.value("ziggurat_stuck_rows") > 0
        disk.answer()
        wait_until(lambda: not service.cache.stuck)
        again = run.step(x)
        assert again.outcome in ("clean", "replayed")
        assert bits_equal(again.value, wanted)
        assert service.metrics.value("ziggurat_stuck_rows") == 0


def test_a_service_ends_while_a_thread_waits(packs: FakePacks, model: FakeModel) -> None:
    disk = DeadDisk(packs, timeout=None)
    with tiers(packs, slots=8, pack=disk.pack) as service:
        disk.dead = None
        service._ahead.preheat([(key, 1.0) for key in range(ROWS)])
        time.sleep(0.2)
        begun = time.monotonic()
        service.close()
    assert time.monotonic() - begun < 20
    disk.answer()


def test_a_place_of_a_shared_arena_stays_out_of_use(packs: FakePacks, disk: DeadDisk, tmp_path: Path) -> None:
    header = disk.pack.header
    with keeper(tmp_path / "socket"):
        want = Attach(arena_key(header), arena_label(header), 4, header.stride)
        arena = attach_arena(tmp_path / "socket", want, 1)
        cache = HostCache(
            disk.pack,
            arena,
            make_policy("lru"),
            experts=header.experts,
            staging=1,
            ledger=open_ledger(arena, disk.pack, "first-read"),
        )

        def get(key: int) -> list[RowFault]:
            return [fault for batch in cache.rows({key: 1.0}, epoch=0) for fault in batch.faults]

        disk.dead = {7}
        assert "has not returned" in get(7)[0].reason
        assert (cache.stuck, len(arena.share.free())) == (1, 3)  # to whoever comes next it is being filled
        disk.answer()
        wait_until(lambda: not cache.stuck)
        assert len(arena.share.free()) == 4
        disk.dead = {8}
        assert get(8)
        cache.close()
        disk.answer()
        wait_until(lambda: not cache.stuck)
        assert len(arena.share.free()) == 3  # the arena process decides, once this engine is gone
        arena.close()
