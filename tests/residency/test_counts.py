"""The books add up: pairs, rows, bytes, passes and outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.fake_moe import LAYERS, TOP_K, FakeModel, FakePacks, Passes, tiers
from support.wrapped_packs import WrappedPack
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import OUTCOMES

pytestmark = pytest.mark.usefixtures("layers")

STEPS, TOKENS, PADDING = 6, 4, 2
INLINE = {"mode": "inline"}
REPLAY = {"mode": "replay", "max_replays": 2}


def total(metrics: TierMetrics, name: str) -> float:
    """Sum over all labels; for a histogram the sum of its observations."""
    return sum(sample.value for sample in metrics.samples() if sample.spec.name == name)


@pytest.mark.parametrize(
    "miss", [INLINE, REPLAY, {**REPLAY, "tolerance": 20}], ids=["inline", "replay", "tol"]
)
@pytest.mark.parametrize("slots", [48, 20, 4, 1])
@pytest.mark.parametrize("places", [None, 10])
def test_counts_add_up(
    packs: FakePacks, model: FakeModel, miss: dict[str, Any], slots: int, places: int | None
) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=slots, places=places, miss=miss, pack=pack) as service:
        run = Passes(model, service)
        results = [run.step(model.inputs(TOKENS, seed=i % 4), padding=PADDING) for i in range(STEPS)]
        m = service.metrics
        value = m.value
        stride = packs.open().header.stride

        routed = value("ziggurat_routed_pairs_total")
        assert routed == STEPS * TOKENS * TOP_K * LAYERS
        assert value("ziggurat_hit_pairs_total") + value("ziggurat_missed_pairs_total") == routed
        assert value("ziggurat_missed_pairs_total") == sum(r.misses_first_pass for r in results)
        assert value("ziggurat_steps_without_miss_total") == sum(r.misses_first_pass == 0 for r in results)

        passes = sum(r.passes for r in results)
        assert value("ziggurat_passes_total") == passes == total(m, "ziggurat_step_passes")
        assert value("ziggurat_replay_passes_total") == passes - STEPS
        assert value("ziggurat_step_passes") == STEPS
        replayed_pairs = (passes - STEPS) * TOKENS * TOP_K * LAYERS
        assert value("ziggurat_replay_routed_pairs_total") == replayed_pairs
        for outcome in OUTCOMES:
            assert value("ziggurat_steps_total", outcome) == sum(r.outcome == outcome for r in results)

        for source in ("arena", "pack"):
            for target in ("pool", "arena"):
                rows = value("ziggurat_fetched_rows_total", source, target)
                assert value("ziggurat_fetched_bytes_total", source, target) == rows * stride
            rows = value("ziggurat_fetched_rows_total", source, "pool")
            assert value("ziggurat_fetch_seconds", source) == rows
        assert value("ziggurat_fetched_rows_total", "pack", "pool") == len(pack.log)
        into_pool = sum(value("ziggurat_fetched_rows_total", s, "pool") for s in ("arena", "pack"))
        assert into_pool == service.slots.used + value("ziggurat_evictions_total", "pool")
        if places is None:
            assert value("ziggurat_fetched_rows_total", "arena", "pool") == 0

        assert value("ziggurat_tier_used_rows", "pool") == service.slots.used
        assert value("ziggurat_tier_capacity_bytes", "pool") == slots * stride
        assert value("ziggurat_tier_used_rows", "arena") == service.cache.used
        assert value("ziggurat_tier_capacity_rows", "arena") == (0 if places is None else places - 2)
        assert value("ziggurat_coverage_ratio") == slots / 48
        for tier in ("pool", "arena"):
            assert 0 <= value("ziggurat_tier_occupancy_ratio", tier) <= 1
        assert value("ziggurat_row_stride_bytes") == stride
        assert value("ziggurat_io_errors_total") == value("ziggurat_failed_tokens_total") == 0


def test_a_second_visit_is_all_hits(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=48) as service:
        run = Passes(model, service)
        first, second = run.step(model.inputs(4)), run.step(model.inputs(4))
        assert first.misses_first_pass == 4 * TOP_K * LAYERS
        assert second.misses_first_pass == 0
        assert service.metrics.value("ziggurat_hit_pairs_total") == 4 * TOP_K * LAYERS


def test_preheated_rows_are_booked_apart_from_fetches(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    with tiers(packs, slots=2, heat_folder=tmp_path) as service:
        Passes(model, service).step(model.inputs(4))
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=2, places=12, pack=pack, heat_folder=tmp_path) as service:
        service.warm_start()
        service.preheated()
        assert service.metrics.value("ziggurat_fetched_rows_total", "pack", "arena") == 10
        assert service.metrics.value("ziggurat_fetched_rows_total", "pack", "pool") == 2
        assert service.metrics.value("ziggurat_tier_used_rows", "arena") == 10
        assert len(pack.log) == 12
        assert service.metrics.value("ziggurat_routed_pairs_total") == 0


def test_pool_heat_compares_what_the_pool_holds_with_the_best_it_could(
    packs: FakePacks, model: FakeModel
) -> None:
    with tiers(packs, slots=6) as service:
        run = Passes(model, service)
        for _ in range(17):  # the gauges look at heat every 16 steps
            run.step(model.inputs(4))
        held = service.metrics.value("ziggurat_pool_heat_ratio")
        best = service.metrics.value("ziggurat_pool_heat_best_ratio")
        assert 0 < held <= best < 1
