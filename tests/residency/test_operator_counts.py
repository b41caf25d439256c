"""What operators look at beyond hits and misses: tiers, layers, tokens, time, heat, budget."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from support.fake_moe import EXPERTS, LAYERS, TOP_K, FakeModel, FakePacks, Passes, tiers
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.topology import Gpu, GpuSurvey, PcieLink
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.budget import MachineLimits, ModelFacts, plan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.describe import describe_budget, describe_link
from ziggurat.residency.factory import open_service
from ziggurat.residency.layer_figures import set_heat
from ziggurat.residency.metric_specs import BUDGET, HOTTEST, STEP_PARTS
from ziggurat.residency.metrics import Sample, TierMetrics
from ziggurat.residency.passes import PassPath, StepTokens
from ziggurat.residency.step_clock import StepClock

STEPS, TOKENS = 6, 4


def by_layer(metrics: TierMetrics, name: str, **labels: str) -> list[float]:
    """A metric's values in the order of the layers."""
    wanted = set(labels.items())
    return [s.value for s in metrics.samples() if s.spec.name == name and wanted <= set(s.labels)]


def infos(metrics: TierMetrics) -> dict[str, dict[str, str]]:
    return {s.spec.name: dict(s.labels) for s in metrics.samples() if s.spec.kind == "info"}


@pytest.mark.parametrize("mode", ["inline", "replay"])
@pytest.mark.parametrize("slots", [48, 20, 4])
@pytest.mark.usefixtures("layers")
def test_tiers_layers_and_tokens_add_up(packs: FakePacks, model: FakeModel, slots: int, mode: str) -> None:
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=slots, places=10, miss={"mode": mode}, pack=pack) as service:
        run = Passes(model, service)
        prompt = np.array([True, True, False, False])
        run.step(model.inputs(TOKENS), StepTokens(TOKENS, prompt))
        from_prompt = service.metrics.value("ziggurat_prompt_fetched_rows_total")
        for seed in range(1, STEPS):
            run.step(model.inputs(TOKENS, seed=seed % 3))
        service.collect()
        m, value = service.metrics, service.metrics.value

    hits = {tier: value("ziggurat_tier_hits_total", tier) for tier in ("pool", "arena", "pack")}
    misses = {tier: value("ziggurat_tier_misses_total", tier) for tier in ("pool", "arena", "pack")}
    assert hits["pool"] == value("ziggurat_hit_pairs_total")
    assert misses["pool"] == value("ziggurat_missed_pairs_total")
    moved = {
        (source, target): value("ziggurat_fetched_rows_total", source, target)
        for source in ("arena", "pack")
        for target in ("pool", "staging")
    }
    assert hits["arena"] == moved["arena", "pool"] + moved["arena", "staging"]
    assert (
        misses["arena"] == hits["pack"] == moved["pack", "pool"] + moved["pack", "staging"] == len(pack.log)
    )
    assert misses["pack"] == 0
    assert value("ziggurat_pack_read_bytes_total") == len(pack.log) * pack.header.stride

    fetched = by_layer(m, "ziggurat_layer_fetched_rows_total")
    assert sum(fetched) == moved["arena", "pool"] + moved["pack", "pool"]
    rows = next(s for s in m.samples() if s.spec.name == "ziggurat_fetch_rows")
    assert rows.value == sum(moved.values())
    assert value("ziggurat_fetching_rows") == 0

    tokens = {phase: value("ziggurat_tokens_total", phase) for phase in ("prefill", "decode", "untold")}
    assert sum(tokens.values()) == STEPS * TOKENS
    assert tokens["prefill"] == 2
    assert value("ziggurat_prompt_steps_total") == 1
    assert from_prompt == value("ziggurat_prompt_fetched_rows_total") > 0

    waited = STEPS * TOKENS - tokens["untold"]
    assert value("ziggurat_step_seconds") == waited / TOKENS
    parts = {part: value("ziggurat_step_part_seconds_total", part) for part in STEP_PARTS}
    total = next(s.value for s in m.samples() if s.spec.name == "ziggurat_step_seconds")
    assert sum(parts.values()) == pytest.approx(total)
    assert parts["fetch"] > 0
    assert (parts["repeated_passes"] > 0) == (value("ziggurat_replay_passes_total") > 0)


def test_a_scrape_during_a_fetch_sees_it(packs: FakePacks, model: FakeModel) -> None:
    seen: list[float] = []
    pack = WrappedPack(packs.open())
    with tiers(packs, slots=12, pack=pack) as service:
        pack.before = lambda key: seen.append(service.metrics.value("ziggurat_fetching_rows"))
        Passes(model, service).step(model.inputs(2))
    assert seen
    assert min(seen) > 0


class Ticks:
    """A clock that a test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.fetched = 100.0, 7.0
        monkeypatch.setattr("ziggurat.residency.step_clock.time.perf_counter", lambda: self.now)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def fetch(self, seconds: float) -> None:
        self.now += seconds
        self.fetched += seconds


def test_the_clock_tells_passes_and_fetches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    clock = StepClock(lambda: ticks.fetched)
    ticks.work(1.0)
    run = clock.watch(lambda path: ticks.work(4.0 if path is PassPath.GRAPH else 16.0))
    run(PassPath.GRAPH)
    ticks.work(0.5)  # waits for the device
    ticks.fetch(32.0)
    run(PassPath.EAGER)
    ticks.fetch(64.0)
    assert clock.parts() == {"first_pass": 5.5, "repeated_passes": 16.0, "fetch": 96.0}


def test_the_clock_of_a_step_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    clock = StepClock(lambda: ticks.fetched)

    def forward(path: PassPath) -> None:
        ticks.work(2.0)
        ticks.fetch(0.25)

    clock.watch(forward)(PassPath.EAGER)
    assert clock.parts() == {"first_pass": 2.0, "repeated_passes": 0.0, "fetch": 0.25}


def test_heat_is_shown_by_layer_and_as_a_whole() -> None:
    metrics = TierMetrics()
    metrics.describe((0, 1, 2), {})
    heat = np.zeros((3, 10))
    heat[0, :] = 1.0
    heat[1, 0] = 10.0
    here = np.zeros((3, 10), dtype=np.bool_)
    here[0, :3] = here[1, 0] = here[2, 5] = True
    set_heat(metrics, heat, here, 3)
    assert by_layer(metrics, "ziggurat_layer_pool_heat_ratio") == pytest.approx([0.3, 1.0, 0.0])
    assert by_layer(metrics, "ziggurat_layer_hottest_tenth_ratio") == pytest.approx([0.1, 1.0, 0.0])
    assert metrics.value("ziggurat_pool_heat_ratio") == pytest.approx(13 / 20)
    assert metrics.value("ziggurat_pool_heat_best_ratio") == pytest.approx(12 / 20)
    shares = [metrics.value("ziggurat_heat_ratio", name) for name, _ in HOTTEST]
    assert shares == pytest.approx([0.5, 0.55, 0.6, 0.85, 1.0])


def test_without_heat_every_share_is_nothing() -> None:
    metrics = TierMetrics()
    metrics.describe((0,), {})
    set_heat(metrics, np.zeros((1, 4)), np.zeros((1, 4), dtype=np.bool_), 0)
    assert metrics.value("ziggurat_pool_heat_best_ratio") == 0
    assert by_layer(metrics, "ziggurat_layer_hottest_tenth_ratio") == [0.0]


@pytest.mark.parametrize(("host", "floor"), [("50%", 2), ("0", 0)])
def test_a_service_says_how_it_is_set_up(packs: FakePacks, host: str, floor: int) -> None:
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs.paths[0].parent), "readers": 2},
                "host": {"size": host},
                "device": {"size": "25%"},
            },
            "codecs": {"base": "bf16"},
            "heat": {"path": None},
        }
    )
    metrics = TierMetrics()
    service = open_service(config, packs.geometry, packs.open(), get_codec("bf16"), metrics=metrics)
    service.close()
    found = infos(metrics)
    assert found["ziggurat_tiers_info"] == {
        "codec": "bf16",
        "device": "cpu",
        "eviction": "lfu-decay",
        "host_eviction": "heat-weighted",
        "miss_mode": "auto",
        "lookahead": "0",
        "layers": str(LAYERS),
        "experts": str(EXPERTS),
        "top_k": str(TOP_K),
    }
    assert found["ziggurat_build_info"]["torch"] == torch.__version__
    assert metrics.value("ziggurat_tier_floor_rows", "pool") == 1
    assert metrics.value("ziggurat_tier_floor_rows", "arena") == floor
    budget = {s.labels: s.value for s in metrics.samples() if s.spec.name == "ziggurat_budget_bytes"}
    stride = metrics.value("ziggurat_row_stride_bytes")
    assert budget[(("check", "pool floor"),)] == stride
    assert metrics.value("ziggurat_limit_bytes", "pool floor") == 12 * stride


def test_every_amount_of_a_budget_has_its_series(tmp_path: Path) -> None:
    limit = 1 << 40
    machine = MachineLimits(
        device="cuda:0",
        memory_available=limit,
        cgroup_headroom=limit,
        memlock=limit,
        device_free=limit,
        nodes=(0,),
        node_available=((0, limit), (1, limit)),
        disk_free=limit,
        direct_io=True,
    )
    values = {
        "disk": {"path": str(tmp_path), "direct": "always"},
        "host": {"size": "2GiB"},
        "device": {"size": "25%"},
    }
    config = TiersConfig.from_mapping({"tiers": values})
    found = plan(config, ModelFacts(4, 12, 3, 64, 64), 1 << 20, machine=machine)
    metrics = TierMetrics()
    describe_budget(metrics, found)
    named = {dict(s.labels)["check"] for s in metrics.samples() if s.spec.name == "ziggurat_budget_bytes"}
    amounts = [check for check in found.checks if check.unit != "support"]
    assert len(named) == len({check.name for check in amounts})
    assert "NUMA node memory" in named
    assert named < set(BUDGET)


def survey(link: PcieLink | None) -> GpuSurvey:
    gpu = Gpu(0, "a GPU", "GPU-0", "00000000:01:00.0", None, 1, 1, (9, 0), link)
    return GpuSurvey((gpu,), "580", None)


def link_of(metrics: TierMetrics) -> list[Sample]:
    return [s for s in metrics.samples() if s.spec.name == "ziggurat_link_bytes_per_second"]


def test_the_links_speed_is_that_of_its_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    metrics = TierMetrics()
    here = torch.device("cuda:0")
    for seen in (survey(None), GpuSurvey((), None, "no driver")):
        describe_link(metrics, here, partial(lambda found: found, seen))
        assert link_of(metrics) == []
    # Idle links slow down; what counts is what card and slot can do.
    describe_link(metrics, here, lambda: survey(PcieLink(1, 16, 5, 16)))
    assert link_of(metrics)[0].value == pytest.approx(63.0e9, rel=1e-3)
