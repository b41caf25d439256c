"""Rows on their way to a device: an arena place is not used again while a copy may still read it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.delayed_pool import DelayedEvent, DelayedPool
from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, open_tiers
from ziggurat.residency import transfers
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.host_cache import RowBatch
from ziggurat.residency.late_books import QUIET_SECONDS
from ziggurat.residency.service import ExpertService

MODES: dict[str, dict[str, Any]] = {
    "inline": {"mode": "inline"},
    "replay": {"mode": "replay", "max_replays": 3},
    "exact": {"mode": "replay", "max_replays": 0},
}


@contextmanager
def delayed(
    packs: FakePacks, monkeypatch: pytest.MonkeyPatch, *, slots: int, **options: Any
) -> Iterator[tuple[ExpertService, DelayedPool]]:
    pool = DelayedPool(slots, packs.open().header.stride)
    monkeypatch.setattr(transfers, "events_of", lambda device: lambda: DelayedEvent(pool))
    service = open_tiers(packs, slots=slots, pool=pool, on_device=True, **options)
    try:
        yield service, pool
    finally:
        service.close()


@pytest.mark.parametrize("tokens", [4, 48])
@pytest.mark.parametrize("places", [None, 1, 3, 48])
@pytest.mark.parametrize("slots", [12, 4, 1])
@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_the_resident_model(
    packs: FakePacks,
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    slots: int,
    places: int | None,
    tokens: int,
) -> None:
    with delayed(packs, monkeypatch, slots=slots, places=places, miss=MODES[mode]) as (service, _):
        run = Passes(model, service)
        for step in range(3):
            x = model.inputs(tokens, seed=step)
            assert bits_equal(run.step(x).value, packs.reference(model, x))
            service.slots.check()
            service.cache.check()


def test_a_place_that_is_given_back_at_once_is_noticed(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: a fetcher that takes copies for complete when they have been asked for."""
    store = Fetcher._store

    def too_early(self: Fetcher, batch: RowBatch, slots: dict[int, int]) -> None:
        store(self, batch, slots)
        self.arrived()

    monkeypatch.setattr(Fetcher, "_store", too_early)

    def run() -> None:
        with delayed(packs, monkeypatch, slots=12, places=3, miss=MODES["replay"]) as (service, _):
            steps = Passes(model, service)
            for step in range(3):
                x = model.inputs(4, seed=step)
                assert bits_equal(steps.step(x).value, packs.reference(model, x))

    with pytest.raises(AssertionError):
        run()


def test_rows_that_the_arena_has_travel_in_one_batch_and_nobody_waits(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with delayed(packs, monkeypatch, slots=36, places=60, miss=MODES["replay"]) as (service, pool):
        run = Passes(model, service)
        everything = range(packs.geometry.rows)
        service.cache.fill([(key, 1.0) for key in everything], len(everything))
        assert all(service.cache.holds(key) for key in everything)
        passes = run.step(model.inputs(1)).passes
        assert passes > 1
        assert len(pool.writes) <= passes - 1, "one write for each repair"
        assert pool.drains == 0


def test_copies_of_an_inline_step_are_waited_for_when_the_next_one_begins(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with delayed(packs, monkeypatch, slots=12, places=60, miss=MODES["inline"]) as (service, pool):
        run = Passes(model, service)
        run.step(model.inputs(2, seed=0))
        assert (pool.drains, len(service.cache._open_epochs)) == (0, 1)
        run.step(model.inputs(2, seed=1))
        assert (pool.drains, len(service.cache._open_epochs)) == (1, 1)
    assert service.cache._open_epochs == set()


def test_a_full_pool_counts_later_and_waits_for_nothing(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowEvent(DelayedEvent):
        done = False

        def query(self) -> bool:
            return SlowEvent.done

        def synchronize(self) -> None:
            waited.append(self)

    waited: list[SlowEvent] = []
    pool = DelayedPool(48, packs.open().header.stride)
    monkeypatch.setattr(transfers, "events_of", lambda device: lambda: SlowEvent(pool))
    service = open_tiers(packs, slots=48, pool=pool, on_device=True)
    service.warm_start()
    run = Passes(model, service)
    value = service.metrics.value
    waited.clear()
    for step in range(6):
        x = model.inputs(2, seed=step)
        result = run.step(x)
        assert (result.outcome, result.passes) == ("clean", 1)
        assert bits_equal(result.value, packs.reference(model, x))
    assert len(waited) <= 1, "for the buffer that the slot table goes through"
    assert value("ziggurat_steps_total", "clean") == 0
    assert service.heat.known() == 0
    service.save_heat()
    assert value("ziggurat_steps_total", "clean") == 6
    assert value("ziggurat_hit_pairs_total") == value("ziggurat_routed_pairs_total") == 6 * 2 * 3 * 4
    assert value("ziggurat_step_passes") == 6
    assert service.heat.known() > 0
    with service.paused():
        run.step(model.inputs(2, seed=11))
        SlowEvent.done = True
        time.sleep(3 * QUIET_SECONDS)
        assert value("ziggurat_steps_total", "clean") == 6, "nobody asks the device during a capture"
    for _ in range(200):  # no further step comes, yet the last one is booked
        if value("ziggurat_steps_total", "clean") == 7:
            break
        time.sleep(QUIET_SECONDS)
    assert value("ziggurat_routed_pairs_total") == 7 * 2 * 3 * 4
    service.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ziggurat-books"]
