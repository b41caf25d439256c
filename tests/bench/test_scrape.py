"""The demo's check of /metrics accepts pages that add up and names what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bench.scrape import Scrape, problems, total_steps
from ziggurat.integration.observability.collector import TierCollector
from ziggurat.residency.metric_specs import METRICS
from ziggurat.residency.metrics import TierMetrics

STRIDE = 4096
PAIRS = 240


def described(metrics: TierMetrics) -> None:
    infos = {spec.name: {label: "?" for label, _ in spec.labels} for spec in METRICS if spec.kind == "info"}
    metrics.describe(range(6), infos)


def consistent() -> TierMetrics:
    """What a service that computed 10 tokens in 3 steps may have counted."""
    metrics = TierMetrics()
    described(metrics)
    with metrics.writing():
        metrics.add("ziggurat_routed_pairs_total", PAIRS)
        metrics.add("ziggurat_hit_pairs_total", 200)
        metrics.add("ziggurat_missed_pairs_total", 40)
        metrics.add("ziggurat_tier_hits_total", 200, "pool")
        metrics.add("ziggurat_tier_misses_total", 40, "pool")
        metrics.add("ziggurat_steps_total", 2, "clean")
        metrics.add("ziggurat_steps_total", 1, "replayed")
        metrics.add("ziggurat_passes_total", 4)
        metrics.add("ziggurat_replay_passes_total", 1)
        metrics.observe("ziggurat_step_passes", [1.0, 1.0, 2.0])
        metrics.set("ziggurat_row_stride_bytes", STRIDE)
        for source, target, rows in (("pack", "pool", 7), ("arena", "pool", 30), ("pack", "arena", 5)):
            metrics.add("ziggurat_fetched_rows_total", rows, source, target)
            metrics.add("ziggurat_fetched_bytes_total", rows * STRIDE, source, target)
        for tier, rows in (("pool", 8), ("arena", 4)):
            metrics.set("ziggurat_tier_capacity_rows", 8, tier)
            metrics.set("ziggurat_tier_used_rows", rows, tier)
            metrics.set("ziggurat_tier_used_bytes", rows * STRIDE, tier)
    return metrics


def page_text(metrics: TierMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(TierCollector(lambda: {0: metrics.samples()}))
    return generate_latest(registry).decode()


def test_a_page_that_adds_up() -> None:
    page = Scrape.parse(page_text(consistent()))
    assert problems(page, PAIRS) == []
    assert total_steps(page) == 3
    assert page.value("ziggurat_fetched_rows_total", source="arena", target="pool") == 30


SPOILERS: dict[str, Callable[[TierMetrics], None]] = {
    "hits + misses": lambda m: m.add("ziggurat_missed_pairs_total", 1),
    "tokens x layers x top-k": lambda m: (
        m.add("ziggurat_routed_pairs_total", 1),  # type: ignore[func-returns-value]  # a lambda of two calls
        m.add("ziggurat_hit_pairs_total", 1),  # type: ignore[func-returns-value]
    )[0],
    "misses of the pool as a tier": lambda m: m.add("ziggurat_tier_misses_total", 1, "pool"),
    "passes = steps": lambda m: m.add("ziggurat_passes_total", 1),
    "pass histogram": lambda m: m.observe("ziggurat_step_passes", [1.0]),
    "from pack to arena": lambda m: m.add("ziggurat_fetched_bytes_total", 1, "pack", "arena"),
    "from arena to pool": lambda m: m.add("ziggurat_fetched_rows_total", 1, "arena", "pool"),
    "used bytes of the arena": lambda m: m.set("ziggurat_tier_used_bytes", 1, "arena"),
    "beyond its capacity": lambda m: m.set("ziggurat_tier_capacity_rows", 7, "pool"),
    "I/O errors": lambda m: m.add("ziggurat_io_errors_total", 1),
    "verification failures": lambda m: m.add("ziggurat_verification_failures_total", 1),
    "failed reads": lambda m: m.add("ziggurat_failed_reads_total", 1, "io"),
    "rows made anew": lambda m: m.add("ziggurat_rebuilt_rows_total", 1, "yes"),
    "failed tokens": lambda m: m.add("ziggurat_failed_tokens_total", 1),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_page_that_does_not(name: str) -> None:
    metrics = consistent()
    SPOILERS[name](metrics)
    found = problems(Scrape.parse(page_text(metrics)), PAIRS)
    assert any(name in line for line in found), found


@pytest.mark.parametrize(
    "gone",
    [
        "ziggurat_unarmed_calls_total",
        "ziggurat_fetch_seconds_sum",
        'ziggurat_tier_used_rows{rank="0",tier="arena"}',
    ],
)
def test_a_missing_series_is_named(gone: str) -> None:
    name = gone.partition("{")[0]
    lines = [line for line in page_text(consistent()).splitlines() if not line.startswith(gone)]
    (problem,) = problems(Scrape.parse("\n".join(lines) + "\n"), PAIRS)
    assert problem.startswith("not on the page")
    assert name in problem
