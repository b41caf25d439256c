"""What a step does when the device serves its own misses: passes, outcomes, ranks, failures, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.admissions import admission_of
from support.fake_moe import EXPERTS, FakeModel, FakePacks, Passes, bits_equal, open_tiers, tiers
from support.ranks import ThreadConsensus, run_ranks
from support.wrapped_packs import WrappedPack
from ziggurat.residency import late_books, transfers
from ziggurat.residency.inline import state
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.choice import MappedArena
from ziggurat.residency.passes import PassPath, StepResult, StepTokens
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.service import ExpertService

ROWS = 48
INLINE = {"mode": "inline"}


def started(packs: FakePacks, **options: Any) -> ExpertService:
    service = open_tiers(packs, inline=True, **options)
    service.warm_start()
    service.preheated()
    return service


# -- which passes --------------------------------------------------------------------------------------------------


def test_rows_only_on_disk_are_read_and_the_step_runs_again(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=24, places=30, inline=True, miss={"max_replays": 64}) as service:
        run = Passes(model, service)
        x = model.inputs(1)
        result = run.step(x)
        assert result.outcome == "replayed"
        assert run.paths == [PassPath.GRAPH] * result.passes
        assert service.metrics.value("ziggurat_arena_misses_total") >= 3 * 4
        assert service.metrics.value("ziggurat_fetched_rows_total", "pack", "arena") > 0
        again = run.step(x)
        assert (again.outcome, again.passes, again.misses_first_pass) == ("clean", 1, 0)
        assert bits_equal(result.value, again.value)


def test_a_pass_finds_what_the_one_before_it_took_from_the_arena(packs: FakePacks, model: FakeModel) -> None:
    """A step's twelve rows fit the arena, not the pool; so each pass settles one layer at least, and four suffice."""
    miss = {"mode": "inline", "max_replays": 4}
    with tiers(packs, slots=4, places=14, inline=True, miss=miss, eviction="lru") as service:
        service.warm_start()
        service.preheated()
        assert service._inline is not None
        run = Passes(model, service)
        with service._inline.promoter.paused():  # a thread may take rows away for hotter ones
            for seed in range(30):
                x = model.inputs(1, seed=seed)
                result = run.step(x)
                assert result.outcome in ("clean", "inline", "replayed"), seed
                assert bits_equal(result.value, packs.reference(model, x))
        assert service.metrics.value("ziggurat_steps_total", "replayed") > 20


def test_rows_that_do_not_fit_the_arena_together_are_not_read_for_nothing(
    packs: FakePacks, model: FakeModel
) -> None:
    """They would push each other out, pass by pass."""
    miss = {"mode": "inline", "max_replays": 4}
    with tiers(packs, slots=6, places=18, inline=True, miss=miss) as service:
        service.warm_start()
        service.preheated()
        assert service._inline is not None
        run, passes = Passes(model, service), []
        with service._inline.promoter.paused():
            for seed in range(8):
                x = model.inputs(2, seed=seed)
                result = run.step(x)
                assert result.outcome == "exact"
                assert bits_equal(result.value, packs.reference(model, x))
                passes.append(result.passes)
        assert passes.count(2) >= 4, passes


def test_after_the_last_replay_comes_an_exact_pass(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=24, places=30, inline=True, miss={"max_replays": 0}) as service:
        run = Passes(model, service)
        x = model.inputs(1)
        result = run.step(x)
        assert (result.outcome, run.paths) == ("exact", [PassPath.GRAPH, PassPath.EAGER])
        assert bits_equal(result.value, packs.reference(model, x))


def test_a_batch_that_does_not_fit_the_pool_passes_by(packs: FakePacks, model: FakeModel) -> None:
    service = started(packs, slots=5, places=ROWS)
    run = Passes(model, service)
    for tokens, outcome in ((1, "inline"), (2, "streamed"), (1, "inline")):
        x = model.inputs(tokens, seed=tokens)
        result = run.step(x)
        assert bits_equal(result.value, packs.reference(model, x))
        assert result.outcome == outcome
        assert run.paths == [PassPath.EAGER if outcome == "streamed" else PassPath.GRAPH]
    service.close()


@pytest.mark.parametrize(("prompt", "outcome"), [(0, "inline"), (1, "streamed")])
def test_a_prompt_that_would_evict_too_much_passes_by(
    packs: FakePacks, model: FakeModel, prompt: int, outcome: str
) -> None:
    service = started(packs, slots=24, places=ROWS)
    x = model.inputs(4)
    tokens = StepTokens(4, np.arange(4) < prompt)
    assert Passes(model, service).step(x, tokens).outcome == outcome
    service.close()


def test_prompts_are_no_uses(packs: FakePacks, model: FakeModel) -> None:
    """A prompt that is short beside the pool takes slots, and they are the first to go again."""
    service = started(packs, slots=47, places=ROWS)
    heat = admission_of(service).heat
    before = heat.clone()
    x = model.inputs(1)
    assert Passes(model, service).step(x, StepTokens(1, np.array([True]))).outcome == "streamed"
    service.close()
    assert torch.equal(heat, before)


def test_tolerated_misses_are_counted_apart(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=24, places=30, inline=True, miss={"tolerance": 99}) as service:
        run = Passes(model, service)
        x = model.inputs(1)
        results = [run.step(x) for _ in range(9)]
        assert results[0].outcome == "tolerated"
        assert results[-1].outcome == "clean"
        assert bits_equal(results[-1].value, packs.reference(model, x))


# -- books ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [ROWS, 30])
def test_counts_add_up(packs: FakePacks, model: FakeModel, places: int) -> None:
    service = started(packs, slots=12, places=places)
    run = Passes(model, service)
    value = service.metrics.value
    before = {name: value("ziggurat_fetched_rows_total", name, "pool") for name in ("arena", "pack")}
    results = [run.step(model.inputs(2, seed=seed % 7), padding=2) for seed in range(20)]
    service.collect()
    routed = value("ziggurat_routed_pairs_total")
    assert routed == 20 * 2 * 3 * 4
    assert value("ziggurat_hit_pairs_total") + value("ziggurat_missed_pairs_total") == routed
    assert value("ziggurat_missed_pairs_total") > 0
    passes = sum(result.passes for result in results)
    assert value("ziggurat_passes_total") == passes
    assert value("ziggurat_replay_passes_total") == passes - 20
    inline = value("ziggurat_inline_rows_total")
    assert value("ziggurat_inline_bytes_total") == inline * service.cache.stride
    assert value("ziggurat_fetched_rows_total", "arena", "pool") - before["arena"] == inline > 0
    moved = sum(value("ziggurat_fetched_rows_total", name, "pool") for name in ("arena", "pack"))
    assert moved == service.slots.used + value("ziggurat_evictions_total", "pool")
    samples = service.metrics.samples()
    assert sum(s.value for s in samples if s.spec.name == "ziggurat_layer_fetched_rows_total") == moved
    assert value("ziggurat_tier_hits_total", "pool") == value("ziggurat_hit_pairs_total")
    assert value("ziggurat_tier_misses_total", "pool") == value("ziggurat_missed_pairs_total")
    assert value("ziggurat_tier_hits_total", "arena") >= inline
    assert value("ziggurat_tier_misses_total", "arena") >= value("ziggurat_arena_misses_total")
    assert sum(value("ziggurat_tokens_total", phase) for phase in ("prefill", "decode", "untold")) == 20 * 2
    assert value("ziggurat_miss_serving_ratio", "inline") == 1
    if places == ROWS:
        assert {result.outcome for result in results} == {"inline"}
        assert value("ziggurat_arena_misses_total") == 0
        without = value("ziggurat_steps_without_miss_total")
        assert value("ziggurat_steps_total", "clean") == without
        assert value("ziggurat_steps_total", "inline") == 20 - without
    else:
        assert value("ziggurat_missed_pairs_total") == sum(r.misses_first_pass for r in results)
    service.close()


def test_heat_of_a_step_is_its_routing(packs: FakePacks, model: FakeModel, tmp_path: Path) -> None:
    """Three services that serve misses in three ways, and count the same."""
    found = []
    for options in ({"inline": True}, {"on_device": True}, {"on_device": False}):
        with tiers(packs, slots=12, places=ROWS, **options) as service:
            service.warm_start()
            service.preheated()
            for seed in range(3):
                Passes(model, service).step(model.inputs(2, seed=seed), padding=1)
                service.collect()  # of several steps at once it is not known which one was first
            found.append(service.heat.counts.copy())
    assert np.allclose(found[0], found[1])
    assert np.allclose(found[0], found[2])


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_read_fails_its_tokens_only(packs: FakePacks, model: FakeModel) -> None:
    pack = WrappedPack(packs.open())
    x = model.inputs(8)
    expected = packs.reference(model, x)
    with tiers(packs, slots=36, places=30, inline=True, pack=pack, miss=INLINE) as service:
        run = Passes(model, service)
        pack.failing = dict.fromkeys((3 * EXPERTS, 3 * EXPERTS + 1), "io")  # of the last layer
        result = run.step(x)
        assert result.outcome == "failed"
        assert {failure.expert for failure in result.failures} <= {0, 1}
        assert result.failed_tokens is not None
        kept = torch.from_numpy(~result.failed_tokens)
        assert 0 < int(kept.sum()) < 8
        assert bits_equal(result.value[kept], expected[kept])
        pack.failing = {}
        assert bits_equal(run.step(x).value, expected)


@pytest.mark.parametrize("places", [ROWS, 30])
def test_a_forward_that_raises_leaves_the_service_usable(
    packs: FakePacks, model: FakeModel, places: int
) -> None:
    service = started(packs, slots=12, places=places)
    run = Passes(model, service)
    run.step(model.inputs(2))

    def broken(path: PassPath) -> None:
        model.forward(model.inputs(2, seed=5), service.moe)
        raise ValueError("in the middle")

    for _ in range(2):
        with pytest.raises(ValueError, match="middle"):
            service.run_step(broken, StepTokens(2))
    for seed in range(4):
        x = model.inputs(2, seed=seed)
        assert bits_equal(run.step(x).value, packs.reference(model, x))
    service.collect()
    service.slots.check()
    admission = admission_of(service)
    assert torch.equal(admission.table, service.slots.table.table)
    service.close()


# -- restarts ------------------------------------------------------------------------------------------------------


def test_a_pool_can_start_anew_with_other_sizes(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=ROWS, places=30, inline=True, miss=INLINE) as service:
        run = Passes(model, service)
        for slots, seed in ((ROWS, None), (12, 1), (ROWS, 2), (4, 3), (1, 4), (24, 5)):
            service.resize(slots, slot_seed=seed)
            if slots == ROWS:
                assert service.warm_start().pool_rows == ROWS
            for step in range(4):
                x = model.inputs(1 + step, seed=step)
                result = run.step(x)
                assert bits_equal(result.value, packs.reference(model, x)), (slots, step)
                if slots == ROWS:
                    assert (result.outcome, result.passes) == ("clean", 1)
            service.collect()
            service.slots.check()
            assert service.slots.used <= slots


def test_heat_fills_pool_and_arena_and_reaches_the_device(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    with tiers(packs, slots=12, places=ROWS, inline=True, heat_folder=tmp_path) as service:
        for seed in range(4):
            Passes(model, service).step(model.inputs(2, seed=seed))
        service.collect()
        hottest = [key for key, _ in service.heat.order()]
    with tiers(packs, slots=6, places=20, inline=True, heat_folder=tmp_path) as service:
        service.warm_start()
        service.preheated()
        assert set(service.slots.held()) == set(hottest[:6])
        assert {key for key in range(ROWS) if service.cache.holds(key)} == set(hottest[6:24])
        heat = admission_of(service).heat
        given = heat[torch.tensor(hottest)]
        assert (given[:-1] >= given[1:]).all(), "the same order, but for what rounding makes equal"
        assert given[0] > given[-1] > 0


# -- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [(48, 4), (12, 24), (24, 24)], ids=str)
@pytest.mark.parametrize("places", [(ROWS, ROWS), (ROWS, 20), (30, 9)], ids=str)
def test_ranks_take_the_same_passes(
    packs_tp2: FakePacks, model: FakeModel, pools: tuple[int, int], places: tuple[int, int]
) -> None:
    batches = [(1, 0), (2, 1), (40, 2), (1, 0), (4, 3)]
    expected = [packs_tp2.reference(model, model.inputs(*batch)) for batch in batches]

    def work(consensus: ThreadConsensus) -> list[StepResult[torch.Tensor]]:
        rank = consensus.rank
        service = open_tiers(
            packs_tp2, slots=pools[rank], places=places[rank], rank=rank, consensus=consensus, inline=True
        )
        service.warm_start()
        run = Passes(model, service, consensus.all_reduce)
        results = [run.step(model.inputs(*batch)) for batch in batches]
        service.close()
        return results

    one, other = run_ranks(2, work).all()
    for mine, theirs, right in zip(one, other, expected, strict=True):
        assert mine.passes == theirs.passes
        assert bits_equal(mine.value, right)
        assert bits_equal(theirs.value, right)


# -- who serves misses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options", "serving", "why"),
    [
        ("auto", {}, "inline", "reads the arena"),
        ("auto", {"slots": ROWS}, "replay", "a slot for every expert"),
        ("inline", {"slots": ROWS}, "inline", "reads the arena"),
        ("replay", {}, "replay", "miss.mode is replay"),
        ("auto", {"places": 2}, "replay", "no arena to cache rows in"),
        ("inline", {"places": 2}, "host", "no arena to cache rows in"),
        ("auto", {"mapped": MappedArena(None, "not page-locked")}, "replay", "not page-locked"),
    ],
)
def test_the_choice_is_made_and_told(
    packs: FakePacks,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    options: dict[str, Any],
    serving: str,
    why: str,
) -> None:
    caplog.set_level("INFO")
    with tiers(packs, **{"slots": 12, "inline": True, "miss": {"mode": mode}, **options}) as service:
        assert service.choice.serving == serving
        assert service.metrics.value("ziggurat_miss_serving_ratio", serving) == 1
        assert any(why in record.getMessage() for record in caplog.records)


# -- passes that nobody waits for ----------------------------------------------------------------------------------


class SlowEvent:
    """An event of a device that is behind until `done`."""

    done = False
    waited = 0

    def record(self) -> None:
        return

    def query(self) -> bool:
        return SlowEvent.done

    def synchronize(self) -> None:
        SlowEvent.waited += 1


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("slots", "miss"), [(12, "inline"), (ROWS, "inline"), (ROWS, "replay")])
def test_a_step_that_nobody_waits_for_asks_the_device_for_nothing(
    packs: FakePacks, slots: int, miss: str
) -> None:
    """One operation when the number of live tokens changes, else none."""
    service = started(packs, slots=slots, places=ROWS, miss={"mode": miss})
    tokens = [1, 1, 1, 2, 2, 1]
    service.run_step(lambda path: None, StepTokens(1))
    service.run_step(lambda path: None, StepTokens(1))
    found = []
    for count in tokens:
        with Operations() as operations:
            service.run_step(lambda path: None, StepTokens(count))
        found.append(operations.names)
    fill = "aten.fill_.Scalar"
    assert found == [[], [], [], [fill], [], [fill]]
    service.close()


@pytest.mark.parametrize("slots", [12, 24])
def test_a_log_that_is_about_to_be_full_is_brought(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """A log of 64 events, of which a step of two tokens can fill 24, and no thread that asks in between."""
    monkeypatch.setattr(state, "_LEAST_ROOM", 1)
    monkeypatch.setattr(late_books, "QUIET_SECONDS", 3600.0)
    service = started(packs, slots=slots, places=ROWS)
    run = Passes(model, service)
    for seed in range(50):
        assert run.step(model.inputs(2, seed=seed)).outcome == "inline"
    late = service._layers.late
    assert late is not None
    assert late.copies > 50 * 24 // 64 - 2
    service.collect()
    service.slots.check()
    assert torch.equal(admission_of(service).table, service.slots.table.table)
    assert service.metrics.value("ziggurat_routed_pairs_total") == 50 * 2 * 3 * 4
    assert service.metrics.value("ziggurat_tokens_total", "untold") == 100
    service.close()


def test_a_place_rests_until_the_counts_of_passes_arrive(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowEvent, "done", False)
    monkeypatch.setattr(transfers, "events_of", lambda device: SlowEvent)
    service = started(packs, slots=12, places=ROWS)
    assert isinstance(service.cache, InlineCache)
    run = Passes(model, service)
    run.step(model.inputs(1))
    before = SlowEvent.waited
    for seed in range(3):
        run.step(model.inputs(1, seed=seed))
    assert SlowEvent.waited == before, "nothing to wait for"
    service.cache.retire([5])
    service.collect(wait=False)
    assert service.cache.resting == 1
    monkeypatch.setattr(SlowEvent, "done", True)
    service.collect(wait=False)
    assert service.cache.resting == 0
    service.close()


def test_a_row_that_is_missing_after_all_is_an_error(packs: FakePacks, model: FakeModel) -> None:
    """Nobody may take rows out of an arena that steps count on; if it happens, no wrong token goes unnoticed."""
    service = started(packs, slots=3, places=ROWS)
    assert isinstance(service.cache, InlineCache)
    run = Passes(model, service)
    run.step(model.inputs(1))
    service.cache.retire(range(ROWS))
    run.step(model.inputs(1))
    with pytest.raises(StepError, match="missed in an arena that holds every row"):
        service.collect()
    service.close()
