"""The rules of the step protocol, one test each, on routing that is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_moe import (
    HIDDEN,
    LAYERS,
    TOP_K,
    FakeModel,
    FakePacks,
    Passes,
    bits_equal,
    open_tiers,
    tiers,
)
from support.ranks import ThreadConsensus, run_ranks
from support.wrapped_packs import WrappedPack
from ziggurat.residency.passes import PassPath, StepResult, StepTokens
from ziggurat.residency.runtime_errors import RoutingError, StepError
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.usefixtures("layers")

Routes = Sequence[Sequence[Sequence[int]]]  # [layer][token][choice]


def routed(*experts: int) -> list[list[int]]:
    """One token."""
    return [list(experts)]


class Script:
    """A forward pass whose routing is a table: pass number -> routes; the last entry repeats."""

    def __init__(self, service: ExpertService, *passes: Routes, rows: int | None = None) -> None:
        self.service = service
        self.passes = passes
        self.rows = rows
        self.paths: list[PassPath] = []
        self.during: Callable[[int], None] = lambda number: None

    def __call__(self, path: PassPath) -> torch.Tensor:
        number = len(self.paths)
        self.paths.append(path)
        outputs = []
        for layer, ids in enumerate(self.passes[min(number, len(self.passes) - 1)]):
            x = torch.ones(len(ids), HIDDEN)
            weights = torch.full((len(ids), TOP_K), 1 / TOP_K)
            outputs.append(self.service.moe(layer, x, weights, torch.tensor(ids)))
            self.during(number)
        return torch.stack(outputs)

    def run(self, count: int | None = None, prefill: Any = None, **options: Any) -> StepResult[torch.Tensor]:
        self.paths = []
        count = len(self.passes[0][0]) if count is None else count
        return self.service.run_step(self, StepTokens(count, prefill, **options))


REPLAY = {"mode": "replay", "max_replays": 3}
L0, L1 = 0, 12  # first row key of each layer


def keys(service: ExpertService) -> set[int]:
    return set(service.slots.held())


# -- pins ----------------------------------------------------------------------------------------------------------


def test_pins_are_those_of_one_pass(packs: FakePacks) -> None:
    """Pass 1 computes layer 0 with zeros and routes layer 1 wrongly. What only that pass wanted may go."""
    wrong = [routed(0, 1, 2), routed(3, 4, 5)]
    right = [routed(0, 1, 2), routed(6, 7, 8)]
    with tiers(packs, slots=6, miss=REPLAY) as service:
        script = Script(service, wrong, right)
        result = script.run()
        assert (result.outcome, result.passes) == ("replayed", 3), "keeping 3, 4, 5 too would need 9 slots"
        assert script.paths == [PassPath.GRAPH] * 3
        assert keys(service) == {L0 + 0, L0 + 1, L0 + 2, L1 + 6, L1 + 7, L1 + 8}


@pytest.mark.parametrize("eviction", ["lru", "lfu-decay"])
def test_a_repair_does_not_evict_what_the_pass_used(packs: FakePacks, eviction: str) -> None:
    """Five slots: the policy's coldest rows are the very ones the pass computed with."""
    with tiers(packs, slots=6, miss=REPLAY, eviction=eviction) as service:
        Script(service, [routed(0, 1, 2)]).run()
        Script(service, [routed(9, 10, 11)]).run()
        for _ in range(4):
            Script(service, [routed(9, 10, 11)]).run()
        result = Script(service, [routed(0, 1, 2), routed(6, 7, 8)]).run()
        assert (result.outcome, result.passes) == ("replayed", 2)
        assert {L0 + 0, L0 + 1, L0 + 2} <= keys(service)


@pytest.mark.parametrize("eviction", ["lru", "lfu-decay"])
def test_what_only_a_wrong_pass_wanted_is_coldest_and_leaves_no_heat(packs: FakePacks, eviction: str) -> None:
    wrong = [routed(0, 1, 2), routed(3, 4, 5)]
    right = [routed(0, 1, 2), routed(6, 7, 8)]
    with tiers(packs, slots=12, miss=REPLAY, eviction=eviction) as service:
        Script(service, [routed(9, 10, 11)]).run()
        assert Script(service, wrong, right).run().outcome == "replayed"
        assert {3 + L1, 4 + L1, 5 + L1} == set(service.slots.policy.order()[-3:])
        really = {0, 1, 2, 9, 10, 11, L1 + 6, L1 + 7, L1 + 8}
        assert {key for key, _ in service.heat.order()} == really
        assert service.cache.holds(L1 + 3), "the arena keeps it: it may well be wanted again"


@pytest.mark.parametrize("eviction", ["lru", "lfu-decay"])
def test_the_disk_s_timing_changes_nothing(packs: FakePacks, model: FakeModel, eviction: str) -> None:
    """Slots, evictions and counts are the same when every batch arrives backwards."""
    seen = []
    for backwards in (False, True):
        pack = WrappedPack(packs.open())
        pack.backwards = backwards
        with tiers(packs, slots=14, places=9, miss=REPLAY, eviction=eviction, pack=pack) as service:
            run = Passes(model, service)
            counts = [run.step(model.inputs(2, seed=seed)).misses_first_pass for seed in range(6)]
            seen.append((counts, service.slots.table.numpy.tolist(), service.slots.policy.order(), pack.log))
    assert seen[0] == seen[1]


def test_what_cannot_fit_is_not_fetched_before_the_exact_pass(packs: FakePacks) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=5, miss=REPLAY, pack=pack) as service:
        script = Script(service, [routed(0, 1, 2), routed(6, 7, 8)])
        reads: list[int] = []
        script.during = lambda number: reads.append(len(pack.log))
        result = script.run()
        assert (result.outcome, result.passes) == ("exact", 2)
        assert script.paths == [PassPath.GRAPH, PassPath.EAGER]
        assert reads == [0, 0, 3, 6], "the inline pass reads each layer's rows itself"


# -- replay passes only look ---------------------------------------------------------------------------------------


def test_a_replay_pass_changes_no_slot(packs: FakePacks) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=6, miss=REPLAY, pack=pack) as service:
        Script(service, [routed(0, 1, 2), routed(3, 4, 5)]).run()
        seen: dict[int, list[tuple[bytes, bytes, int]]] = {}
        script = Script(service, [routed(0, 1, 7), routed(6, 7, 8)], [routed(0, 1, 7), routed(6, 7, 9)])

        def look(number: int) -> None:
            table = service.slots.table.numpy.tobytes()
            seen.setdefault(number, []).append(
                (
                    table,
                    b"".join(service.slots.pool.row(slot).numpy().tobytes() for slot in range(6)),
                    len(pack.log),
                )
            )

        script.during = look
        result = script.run()
        assert result.passes == 3
        for states in seen.values():
            assert len(set(states)) == 1, "table, bytes and reads stand still within a pass"
        assert seen[0][0] != seen[1][0]


def test_a_fixed_point_is_reached_and_bounded(packs: FakePacks) -> None:
    endless = [[routed(3 * i % 12, (3 * i + 1) % 12, (3 * i + 2) % 12)] for i in range(9)]
    for limit in (0, 1, 2, 3):
        with tiers(packs, slots=3, miss={"mode": "replay", "max_replays": limit}) as service:
            script = Script(service, *endless)
            result = script.run()
            assert (result.outcome, result.passes) == ("exact", limit + 2)
            assert script.paths == [PassPath.GRAPH] * (limit + 1) + [PassPath.EAGER]


def test_an_eager_step_is_served_inline_at_once(packs: FakePacks) -> None:
    with tiers(packs, slots=3, miss=REPLAY) as service:
        script = Script(service, [routed(0, 1, 2), routed(6, 7, 8)])
        result = script.run(eager=True)
        assert (result.outcome, result.passes, script.paths) == ("clean", 1, [PassPath.EAGER])


# -- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inline", "replay"])
def test_padding_rows_are_not_misses(packs: FakePacks, mode: str) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=3, miss={"mode": mode}, pack=pack) as service:
        Script(service, [routed(0, 1, 2)]).run()
        script = Script(service, [[[0, 1, 2], [9, 10, 11], [-1, 500, 7]]])
        result = script.run(count=1)
        assert (result.outcome, result.passes, result.misses_first_pass) == ("clean", 1, 0)
        assert pack.log == [0, 1, 2]
        assert keys(service) == {0, 1, 2}
        assert (result.value[0, 1:] == 0).all()
        assert (result.value[0, 0] != 0).any()
        assert service.metrics.value("ziggurat_routed_pairs_total") == 2 * TOP_K


# -- scans ---------------------------------------------------------------------------------------------------------


def test_a_long_prompt_leaves_the_hotter_half_of_the_pool(packs: FakePacks) -> None:
    with tiers(packs, slots=8) as service:
        for _ in range(3):
            Script(service, [routed(0, 1, 2)]).run()
        Script(service, [routed(0, 1, 2), routed(4, 5, 6)]).run()
        hot = {0, 1, 2}
        everything = [[[3 * i, 3 * i + 1, 3 * i + 2] for i in range(4)]] * LAYERS
        Script(service, everything).run(prefill=np.ones(4, dtype=np.bool_))
        assert hot <= keys(service)


def test_a_prompt_does_not_evict_from_the_arena(packs: FakePacks) -> None:
    with tiers(packs, slots=1, places=8) as service:  # 2 staging, 6 cache
        Script(service, [routed(0, 1, 2), routed(0, 1, 2)]).run()
        before = {key for key in range(48) if service.cache.holds(key)}
        assert len(before) == 6
        everything = [[[3 * i, 3 * i + 1, 3 * i + 2] for i in range(4)]] * LAYERS
        Script(service, everything).run(prefill=np.ones(4, dtype=np.bool_))
        assert {key for key in range(48) if service.cache.holds(key)} == before


def test_an_expert_that_decode_wants_too_is_no_scan(packs: FakePacks) -> None:
    with tiers(packs, slots=1, places=3) as service:  # 1 cache place
        Script(service, [routed(0, 0, 0)]).run()
        Script(service, [[[5, 5, 5], [5, 5, 5]]]).run(prefill=np.array([True, False]))
        assert service.cache.holds(5)


# -- tolerance -----------------------------------------------------------------------------------------------------


def test_a_step_within_tolerance_keeps_its_result_and_is_counted_apart(packs: FakePacks) -> None:
    for tolerance, outcome in ((2, "replayed"), (3, "tolerated")):
        with tiers(packs, slots=12, miss={**REPLAY, "tolerance": tolerance}) as service:
            Script(service, [routed(0, 1, 2)]).run(eager=True)
            script = Script(service, [[[0, 1, 2], [0, 1, 3], [3, 1, 4]]])
            result = script.run()
            assert (result.outcome, result.misses_first_pass) == (outcome, 3)
            assert service.metrics.value("ziggurat_steps_total", outcome) == 1
            again = script.run()
            assert (again.outcome, again.passes) == ("clean", 1), "the rows were fetched all the same"
            same = bits_equal(again.value, result.value)
            assert same == (outcome == "replayed")
            assert bits_equal(again.value[:, 0], result.value[:, 0]), "token 0 missed nothing"


def test_tolerance_looks_at_the_worst_rank(packs_tp2: FakePacks) -> None:
    def work(consensus: ThreadConsensus) -> list[str]:
        miss = {**REPLAY, "tolerance": 2}
        service = open_tiers(packs_tp2, slots=12, rank=consensus.rank, consensus=consensus, miss=miss)
        Script(service, [routed(0, 1, 2)]).run(eager=True)
        outcomes: list[str] = []
        # rank 0 already has 3 and 4: it misses 1 pair, rank 1 misses 3; then 1 and 2; then both 0
        if consensus.rank == 0:
            service._fetcher.fetch({3: 1.0, 4: 1.0}, blocked=(), epoch=service.cache.open_epoch())
        outcomes.append(Script(service, [routed(3, 4, 5)]).run().outcome)
        if consensus.rank == 0:
            service._fetcher.fetch({6: 1.0}, blocked=(), epoch=service.cache.open_epoch())
        outcomes.append(Script(service, [routed(0, 6, 7)]).run().outcome)
        outcomes.append(Script(service, [routed(0, 6, 7)]).run().outcome)
        return outcomes

    one, other = run_ranks(2, work).all()
    assert one == other == ["replayed", "tolerated", "clean"]


# -- ranks ---------------------------------------------------------------------------------------------------------


def test_a_rank_without_misses_replays_with_the_others(packs_tp2: FakePacks, model: FakeModel) -> None:
    def work(consensus: ThreadConsensus) -> list[tuple[int, int, str]]:
        service = open_tiers(
            packs_tp2,
            slots=(48, 24)[consensus.rank],
            rank=consensus.rank,
            consensus=consensus,
            miss=REPLAY,
        )
        if consensus.rank == 0:
            service.warm_start()
        run = Passes(model, service, consensus.all_reduce)
        steps = [run.step(model.inputs(1, seed=seed)) for seed in range(4)]
        service.close()
        return [(step.passes, step.misses_first_pass, step.outcome) for step in steps]

    one, other = run_ranks(2, work).all()
    assert [(passes, outcome) for passes, _, outcome in one] == [(p, o) for p, _, o in other]
    assert all(misses == 0 for _, misses, _ in one)
    assert any(misses > 0 and passes > 1 for passes, misses, _ in other)


def test_no_collective_more_than_needed(packs_tp2: FakePacks, layers: str) -> None:
    def work(consensus: ThreadConsensus) -> list[tuple[int, int]]:
        service = open_tiers(packs_tp2, slots=6, rank=consensus.rank, consensus=consensus, miss=REPLAY)
        seen = []
        for script in (Script(service, [routed(0, 1, 2)]), Script(service, [routed(0, 1, 2)])):
            consensus.sums = consensus.gathers = 0
            script.run()
            seen.append((consensus.sums, consensus.gathers))
        return seen

    one, other = run_ranks(2, work).all()
    # misses, fits, fetched, no misses; and a clean step is a single sum
    once = int(layers == "device")  # whether a pool of each rank has room for every row
    assert one == other == [(4 + once, 0), (1, 0)]


# -- what is not a step --------------------------------------------------------------------------------------------


def test_an_unarmed_layer_answers_zeros_and_touches_nothing(packs: FakePacks) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=4, pack=pack) as service:
        x = torch.ones(5, HIDDEN, dtype=torch.bfloat16)
        y = service.moe(0, x, torch.ones(5, TOP_K), torch.full((5, TOP_K), 99))
        assert y.dtype == torch.bfloat16
        assert y.shape == x.shape
        assert (y == 0).all()
        assert pack.log == []
        assert service.metrics.value("ziggurat_unarmed_calls_total") == 1
        assert service.metrics.value("ziggurat_routed_pairs_total") == 0


def test_a_forward_that_raises_leaves_the_service_usable(packs: FakePacks) -> None:
    with tiers(packs, slots=4, miss=REPLAY) as service:

        def broken(path: PassPath) -> None:
            service.moe(0, torch.ones(1, HIDDEN), torch.ones(1, TOP_K), torch.tensor(routed(0, 1, 2)))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            service.run_step(broken, StepTokens(1))
        assert (service.moe(0, torch.ones(1, HIDDEN), torch.ones(1, TOP_K), torch.ones(1, 3)) == 0).all()
        assert service.cache._open_epochs == set()
        assert Script(service, [routed(0, 1, 2)]).run().outcome == "replayed"


@pytest.mark.parametrize("ids", [routed(0, 1, 12), routed(-1, 1, 2)])
def test_an_expert_that_does_not_exist_is_an_error(packs: FakePacks, ids: list[list[int]]) -> None:
    with tiers(packs, slots=4) as service, pytest.raises(RoutingError, match=r"experts are 0\.\.11"):
        Script(service, [ids]).run()


def test_routing_of_another_shape_is_an_error(packs: FakePacks) -> None:
    def calling(**changes: Any) -> Callable[[PassPath], torch.Tensor]:
        call = {
            "layer": 0,
            "x": torch.ones(1, HIDDEN),
            "topk_weights": torch.ones(1, TOP_K),
            "topk_ids": torch.zeros(1, TOP_K, dtype=torch.int64),
        }
        return lambda path: service.moe(**{**call, **changes})

    with tiers(packs, slots=4) as service:
        for changes, message in (
            ({"layer": LAYERS}, "layer index 4 does not exist"),
            ({"x": torch.ones(1, HIDDEN + 1)}, "expected"),
            ({"topk_ids": torch.zeros(1, 2, dtype=torch.int64)}, "must both be"),
            ({"topk_weights": torch.ones(2, TOP_K)}, "must both be"),
        ):
            with pytest.raises(RoutingError, match=message):
                service.run_step(calling(**changes), StepTokens(1))
        with pytest.raises(RoutingError, match="2 live tokens"):
            service.run_step(calling(), StepTokens(2))


def test_steps_do_not_nest_and_need_a_sound_batch(packs: FakePacks) -> None:
    service = open_tiers(packs, slots=4)
    with pytest.raises(StepError, match="already running"):
        service.run_step(lambda path: service.run_step(lambda path: None, StepTokens(1)), StepTokens(1))
    with pytest.raises(StepError, match="one flag for each of the 2"):
        service.run_step(lambda path: None, StepTokens(2, np.ones(3, dtype=np.bool_)))
    with pytest.raises(StepError, match="at least 0"):
        service.run_step(lambda path: None, StepTokens(-1))
    service.close()
    with pytest.raises(StepError, match="closed"):
        service.run_step(lambda path: None, StepTokens(1))


def test_a_step_without_live_tokens_is_clean(packs: FakePacks) -> None:
    with tiers(packs, slots=4) as service:
        result = Script(service, [[[9, 10, 11]]]).run(count=0)
        assert (result.outcome, result.misses_first_pass) == ("clean", 0)
        assert (result.value == 0).all()


def test_an_expert_named_twice_by_one_token_counts_twice(packs: FakePacks) -> None:
    with tiers(packs, slots=4) as service:
        x, weights = torch.ones(1, HIDDEN), torch.tensor([[0.5, 0.25, 0.25]])
        ids = torch.tensor(routed(3, 5, 3))
        result = service.run_step(lambda path: service.moe(0, x, weights, ids), StepTokens(1))
        assert bits_equal(result.value, packs.resident()(0, x, weights, ids))
        assert result.misses_first_pass == 3
        assert service.metrics.value("ziggurat_fetched_rows_total", "pack", "pool") == 2
