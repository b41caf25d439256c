"""Rows in the arena that nobody has asked for yet: those that wait for a scan, and those that heat may replace."""

from __future__ import annotations

from support.fake_moe import FakePacks
from support.host_rig import ROWS, Rig

# -- rows read early for a scan ------------------------------------------------------------------------------------


def test_rows_wait_in_staging_places_until_a_scan_comes_to_them(packs: FakePacks) -> None:
    rig = Rig(packs, places=8, staging=4)
    rig.get([1, 2, 3, 4])
    report = rig.cache.read_early([2, 20, 21, 22, 23], spare=1)
    assert (report.read, report.full) == (3, True)
    assert not rig.cache.holds(20)
    rig.cache.check()
    assert rig.get([20, 21, 1, 30], weight=0.0) == {1: "arena", 20: "pack", 21: "pack", 30: "pack"}
    assert rig.pack.log == [1, 2, 3, 4, 20, 21, 22, 30], "nothing was read twice"
    assert rig.cache.ahead_used == 2
    assert rig.get([22]) == {22: "pack"}
    assert rig.get([20], weight=0.0) == {20: "pack"}
    assert rig.pack.log[-1] == 20, "a row waits for one request"
    assert rig.cache.evictions == 0


def test_rows_read_early_fill_free_places_as_the_scans_own_do(packs: FakePacks) -> None:
    """Or an arena that began empty would stay so while a thread is always ahead of the scan."""
    rig = Rig(packs, places=7, staging=4)
    report = rig.cache.read_early(range(10, 20), spare=2)
    assert (report.read, report.full) == (2, True), "no more at a time than would wait otherwise"
    assert rig.cache.read_early(range(10, 20), spare=2).read == 2
    assert rig.cache.held() == [10, 11, 12]
    assert rig.get([10, 13], weight=0.0) == {10: "arena", 13: "pack"}
    assert rig.cache.ahead_used == 2
    rig.cache.forget_early()
    assert rig.get([10, 11, 12], weight=0.0) == dict.fromkeys([10, 11, 12], "arena")
    assert rig.cache.ahead_used == 4
    assert rig.pack.log == [10, 11, 12, 13]
    rig.cache.check()


def test_a_row_that_somebody_is_reading_is_not_read_early_as_well(packs: FakePacks) -> None:
    """A thread that reads ahead gets to a row when a scan has come to it already."""
    rig = Rig(packs, places=8, staging=4)
    rig.get([1, 2, 3, 4])
    reports = []
    rig.pack.before = lambda key: reports.append(rig.cache.read_early([10, 11], spare=0))
    assert rig.get([10, 11], weight=0.0) == {10: "pack", 11: "pack"}
    rig.pack.before = lambda key: None
    assert rig.pack.log == [1, 2, 3, 4, 10, 11], "once"
    assert [report.read for report in reports] == [0, 0]
    rig.pack.failing[10] = "io"
    rig.get([10], weight=0.0)
    rig.pack.failing.clear()
    assert rig.cache.read_early([10, 11], spare=0).read == 2, "nobody reads them any more"


def test_a_row_that_waits_makes_room_for_one_that_somebody_waits_for(packs: FakePacks) -> None:
    rig = Rig(packs, places=6, staging=2)
    rig.get([1, 2, 3, 4])
    assert rig.cache.read_early([10, 11], spare=0).read == 2
    assert rig.get([20, 21], weight=0.0) == {20: "pack", 21: "pack"}
    assert rig.get([10], weight=0.0) == {10: "pack"}
    assert rig.pack.log == [1, 2, 3, 4, 10, 11, 20, 21, 10]


def test_the_place_of_an_early_row_rests_while_it_is_copied_out_of(packs: FakePacks) -> None:
    rig = Rig(packs, places=5, staging=1)
    rig.get([1, 2, 3, 4])
    rig.cache.read_early([10], spare=0)
    epoch = rig.cache.open_epoch()
    (batch,) = rig.cache.rows({10: 0.0}, epoch=epoch)
    assert rig.cache.read_early([11], spare=0).full
    rig.check(batch)
    rig.cache.settle(batch)
    assert rig.cache.read_early([11], spare=0).read == 1
    rig.cache.close_epoch(epoch)
    rig.cache.forget_early()
    assert rig.get([11], weight=0.0) == {11: "pack"}
    assert rig.pack.log[-2:] == [11, 11]


def test_an_early_read_that_fails_is_forgotten_and_the_request_says_why(packs: FakePacks) -> None:
    rig = Rig(packs, places=8, staging=4)
    rig.pack.failing[10] = "io"
    for where in ("arena", "pack"):  # while there are free places, and when there are none
        assert [fault.key for fault in rig.cache.read_early([10, 11], spare=1).faults] == [10]
        rig.cache.check()
        assert rig.get([10, 11], weight=0.0) == {10: "injected io failure", 11: where}
        rig.get([1, 2, 3, 4])


# -- rows that nobody has used -------------------------------------------------------------------------------------


def test_heat_replaces_what_nobody_has_used_and_nothing_else(packs: FakePacks) -> None:
    heat = {key: float(key) for key in range(48)}

    def promote(keys: list[int]) -> int:
        wanted = [(key, heat[key]) for key in keys]
        return rig.cache.promote(wanted, heat.__getitem__, 8, displaces_used=False).read

    rig = Rig(packs, places=7, staging=1)
    rig.get([1, 2])
    rig.get([10, 11, 12, 13], weight=0.0)
    assert rig.cache.policy.victim(()) != 1, "a scan's row is the next to leave"
    assert promote([9, 8]) == 0, "all are hotter"
    assert promote([40, 12, 39]) == 2
    assert {1, 2, 39, 40} < set(rig.cache.held())
    rig.get([39])
    assert rig.cache.ahead_used == 1
    assert promote([41, 42, 43, 44, 45]) == 3, "two were used before, one since"
    assert {1, 2, 39} < set(rig.cache.held())
    rig.cache.check()


def test_what_can_be_replaced(packs: FakePacks) -> None:
    rig = Rig(packs, places=5, staging=1)
    seen = [rig.cache.replaceable]  # places are free
    rig.get([1, 2, 3])
    rig.get([9], weight=0.0)
    seen.append(rig.cache.replaceable)  # a row of a scan
    rig.get([9])
    seen.append(rig.cache.replaceable)
    assert seen == [True, True, False]
    whole = Rig(packs, places=ROWS, staging=1)
    whole.cache.fill([(key, 1.0) for key in range(ROWS)], ROWS)
    assert not whole.cache.replaceable, "there is nothing to read"
