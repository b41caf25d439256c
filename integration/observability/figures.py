"""What happened between two scrapes, as figures that people look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ziggurat.integration.observability.page import Page
from ziggurat.residency.metric_specs import HOTTEST, STEP_PARTS

TIERS = ("pool", "arena")


@dataclass(frozen=True, slots=True)
class TierFigures:
    """A tier of all ranks. hit_ratio: of the interval, None if nothing was looked up."""

    name: str
    used_rows: float
    capacity_rows: float
    used_bytes: float
    capacity_bytes: float
    floor_rows: float
    hit_ratio: float | None
    evictions_per_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, from a histogram's buckets, interpolated as Prometheus does; None if nothing was observed."""

    median: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """layer: the model's number. fetched_per_s: rows; of all ranks. The shares are of the layer's recent routings."""

    layer: str
    fetched_per_s: float
    pool_share: float
    hottest_tenth_share: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are of the interval of `seconds`; ratios are None where nothing happened in it.

    Steps and tokens are one rank's, since all ranks run the same; rows and bytes are those of all ranks.
    fetched_bytes_per_s: by source, into the pool and into the staging memory through which prompts' rows pass.
    """

    time: float
    seconds: float
    ranks: int
    setup: dict[str, str]
    steps_per_s: float
    tokens_per_s: dict[str, float]
    outcomes_per_s: dict[str, float]
    passes_per_step: float | None
    zero_miss_ratio: float | None
    hit_ratio: float | None
    missed_per_step: float | None
    tiers: tuple[TierFigures, ...]
    fetched_bytes_per_s: dict[str, float]
    link_bytes_per_s: float | None
    fetch_seconds: dict[str, Latency]
    fetching_rows: float
    prompt_fetch_ratio: float | None
    step_seconds: Latency
    step_parts: dict[str, float]
    pool_heat: float
    pool_heat_best: float
    hottest: dict[str, float]
    layers: tuple[LayerFigures, ...]
    errors: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values for scripts."""
        return asdict(self)


class _Between:
    """Differences of counters. A counter that went down started anew, so all of it is new."""

    def __init__(self, before: Page, after: Page) -> None:
        self.before, self.after = before, after
        self.seconds = max(1e-9, after.time - before.time)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        old = self.before.by(name, label, **labels)
        new = self.after.by(name, label, **labels)
        return {key: _grown(old.get(key, 0.0), value) for key, value in new.items()}

    def total(self, name: str, **labels: str) -> float:
        return _grown(self.before.total(name, **labels), self.after.total(name, **labels))

    def rates(self, name: str, label: str, share: float = 1.0, **labels: str) -> dict[str, float]:
        return {key: count / self.seconds * share for key, count in self.by(name, label, **labels).items()}

    def latency(self, name: str, **labels: str) -> Latency:
        counts = self.by(f"{name}_bucket", "le", **labels)
        return Latency(quantile(0.5, counts), quantile(0.99, counts))


def _grown(old: float, new: float) -> float:
    return new - old if new >= old else new


def quantile(q: float, buckets: Mapping[str, float]) -> float | None:
    """From counts up to each bound, as Prometheus estimates it: linearly within a bucket, the last finite bound for
    what lies beyond it."""
    ordered = sorted(((math.inf if le == "+Inf" else float(le)), count) for le, count in buckets.items())
    if not ordered or ordered[-1][1] <= 0:
        return None
    rank, lower, below = q * ordered[-1][1], 0.0, 0.0
    for bound, count in ordered:
        if count >= rank:
            if math.isinf(bound):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = bound, count
    return lower


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def figures(before: Page, after: Page) -> Figures:
    """What the second page says of the time since the first one, of the same server."""
    change = _Between(before, after)
    ranks = max(1, after.ranks)
    steps = change.total("ziggurat_steps_total")
    routed, missed = (
        change.total("ziggurat_routed_pairs_total"),
        change.total("ziggurat_missed_pairs_total"),
    )
    into_pool = change.total("ziggurat_fetched_rows_total", target="pool")
    timed = change.total("ziggurat_step_seconds_count")
    parts = change.by("ziggurat_step_part_seconds_total", "part")
    link = after.total("ziggurat_link_bytes_per_second")
    return Figures(
        time=after.time,
        seconds=change.seconds,
        ranks=ranks,
        setup=_setup(after),
        steps_per_s=steps / ranks / change.seconds,
        tokens_per_s=change.rates("ziggurat_tokens_total", "phase", 1 / ranks),
        outcomes_per_s=change.rates("ziggurat_steps_total", "outcome", 1 / ranks),
        passes_per_step=_ratio(change.total("ziggurat_passes_total"), steps),
        zero_miss_ratio=_ratio(change.total("ziggurat_steps_without_miss_total"), steps),
        hit_ratio=_ratio(routed - missed, routed),
        missed_per_step=_ratio(missed, steps),
        tiers=tuple(_tier(name, change) for name in TIERS),
        fetched_bytes_per_s=_over_the_link(change),
        link_bytes_per_s=link if link > 0 else None,
        fetch_seconds={
            source: change.latency("ziggurat_fetch_seconds", source=source) for source in ("arena", "pack")
        },
        fetching_rows=after.total("ziggurat_fetching_rows"),
        prompt_fetch_ratio=_ratio(change.total("ziggurat_prompt_fetched_rows_total"), into_pool),
        step_seconds=change.latency("ziggurat_step_seconds"),
        step_parts={part: parts.get(part, 0.0) / timed for part in STEP_PARTS} if timed > 0 else {},
        pool_heat=after.total("ziggurat_pool_heat_ratio") / ranks,
        pool_heat_best=after.total("ziggurat_pool_heat_best_ratio") / ranks,
        hottest={name: after.total("ziggurat_heat_ratio", hottest=name) / ranks for name, _ in HOTTEST},
        layers=_layers(change, ranks),
        errors={
            "reads": after.total("ziggurat_io_errors_total"),
            "checksums": after.total("ziggurat_verification_failures_total"),
            "tokens": after.total("ziggurat_failed_tokens_total"),
            "reread": after.total("ziggurat_reread_rows_total"),
            "rebuilt": after.total("ziggurat_rebuilt_rows_total"),
        },
    )


def _over_the_link(change: _Between) -> dict[str, float]:
    """Bytes a second by source, into the pool and into the staging memory of prompts."""
    pool = change.rates("ziggurat_fetched_bytes_total", "source", target="pool")
    staging = change.rates("ziggurat_fetched_bytes_total", "source", target="staging")
    return {source: rate + staging.get(source, 0.0) for source, rate in pool.items()}


def _setup(page: Page) -> dict[str, str]:
    tiers = ("codec", "device", "eviction", "miss_mode", "layers", "experts", "top_k")
    setup = {label: page.text_of("ziggurat_tiers_info", label) for label in tiers}
    return {**setup, "version": page.text_of("ziggurat_build_info", "version")}


def _tier(name: str, change: _Between) -> TierFigures:
    after = change.after
    hits = change.total("ziggurat_tier_hits_total", tier=name)
    misses = change.total("ziggurat_tier_misses_total", tier=name)
    return TierFigures(
        name=name,
        used_rows=after.total("ziggurat_tier_used_rows", tier=name),
        capacity_rows=after.total("ziggurat_tier_capacity_rows", tier=name),
        used_bytes=after.total("ziggurat_tier_used_bytes", tier=name),
        capacity_bytes=after.total("ziggurat_tier_capacity_bytes", tier=name),
        floor_rows=after.total("ziggurat_tier_floor_rows", tier=name),
        hit_ratio=_ratio(hits, hits + misses),
        evictions_per_s=change.total("ziggurat_evictions_total", tier=name) / change.seconds,
    )


def _layers(change: _Between, ranks: int) -> tuple[LayerFigures, ...]:
    fetched = change.rates("ziggurat_layer_fetched_rows_total", "layer")
    pool = change.after.by("ziggurat_layer_pool_heat_ratio", "layer")
    hottest = change.after.by("ziggurat_layer_hottest_tenth_ratio", "layer")
    return tuple(
        LayerFigures(layer, rate, pool.get(layer, 0.0) / ranks, hottest.get(layer, 0.0) / ranks)
        for layer, rate in fetched.items()
    )


def duration(seconds: float | None) -> str:
    """Three digits with the unit that suits them; a dash for nothing."""
    if seconds is None:
        return "–"
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
