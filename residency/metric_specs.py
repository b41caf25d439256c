"""Every metric of the service: name, type, labels, meaning. Exporters and the README table come from this list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ziggurat.residency.inline.choice import SERVINGS
from ziggurat.residency.passes import OUTCOMES

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """labels: (label, its possible values) in order. bounds: upper bucket bounds of a histogram, ascending."""

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def words(self) -> int:
        """8-byte cells of one series: a histogram has its buckets, one for the rest, and its sum."""
        return len(self.bounds) + 2 if self.kind == "histogram" else 1


_TIER = ("tier", ("pool", "arena"))
_ROUTE = (("source", ("arena", "pack")), ("target", ("pool", "arena", "staging")))
_SOURCE = (("source", ("arena", "pack")),)
_SECONDS = tuple(m * 10.0**e for e in range(-6, 1) for m in (1.0, 2.5, 5.0))
_PASSES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 16.0, 32.0, 64.0)

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "ziggurat_routed_pairs_total",
        "counter",
        "(token, expert) pairs that live tokens were routed to, in the first pass of each step",
    ),
    MetricSpec(
        "ziggurat_hit_pairs_total",
        "counter",
        "Routed pairs whose expert was in the pool, or in a layer that is read in place",
    ),
    MetricSpec("ziggurat_missed_pairs_total", "counter", "Routed pairs whose expert was in neither"),
    MetricSpec(
        "ziggurat_replay_routed_pairs_total", "counter", "Pairs routed by the later passes of replayed steps"
    ),
    MetricSpec(
        "ziggurat_replay_missed_pairs_total", "counter", "Those of them whose expert was not in the pool"
    ),
    MetricSpec("ziggurat_steps_total", "counter", "Steps by how they ended", labels=(("outcome", OUTCOMES),)),
    MetricSpec("ziggurat_steps_without_miss_total", "counter", "Steps that found every expert in the pool"),
    MetricSpec("ziggurat_passes_total", "counter", "Forward passes"),
    MetricSpec("ziggurat_replay_passes_total", "counter", "Forward passes after the first one of a step"),
    MetricSpec("ziggurat_step_passes", "histogram", "Forward passes that a step took", bounds=_PASSES),
    MetricSpec("ziggurat_fetched_rows_total", "counter", "Rows moved between tiers", labels=_ROUTE),
    MetricSpec(
        "ziggurat_fetched_bytes_total",
        "counter",
        "Bytes moved between tiers: rows x row stride",
        labels=_ROUTE,
    ),
    MetricSpec(
        "ziggurat_fetch_seconds",
        "histogram",
        "Time to bring one row into the pool, read and copy",
        labels=_SOURCE,
        bounds=_SECONDS,
    ),
    MetricSpec(
        "ziggurat_inline_rows_total",
        "counter",
        "Rows that a GPU fetched from the arena by itself while a step ran; also counted as moved from arena to pool",
    ),
    MetricSpec("ziggurat_inline_bytes_total", "counter", "Their bytes: rows x row stride"),
    MetricSpec(
        "ziggurat_arena_misses_total",
        "counter",
        "Rows that a GPU wanted to fetch by itself and that were not in the arena",
    ),
    MetricSpec("ziggurat_evictions_total", "counter", "Rows that had to leave a tier", labels=(_TIER,)),
    MetricSpec("ziggurat_io_errors_total", "counter", "Rows that could not be read from the pack"),
    MetricSpec(
        "ziggurat_verification_failures_total",
        "counter",
        "Rows whose checksum did not match, also after a re-read",
    ),
    MetricSpec(
        "ziggurat_failed_tokens_total", "counter", "Tokens whose result was invalid for want of an expert"
    ),
    MetricSpec("ziggurat_unarmed_calls_total", "counter", "Layer calls outside a step, answered with zeros"),
    MetricSpec(
        "ziggurat_miss_serving_ratio",
        "gauge",
        "1 for who serves misses: the host layer by layer, the GPU inline, or the host by replaying steps",
        labels=(("by", SERVINGS),),
    ),
    MetricSpec("ziggurat_row_stride_bytes", "gauge", "Bytes that one row takes in every tier"),
    MetricSpec("ziggurat_tier_capacity_rows", "gauge", "Rows that a tier has room for", labels=(_TIER,)),
    MetricSpec("ziggurat_tier_used_rows", "gauge", "Rows that a tier holds", labels=(_TIER,)),
    MetricSpec("ziggurat_tier_capacity_bytes", "gauge", "Bytes of a tier's rows when full", labels=(_TIER,)),
    MetricSpec("ziggurat_tier_used_bytes", "gauge", "Bytes of the rows that a tier holds", labels=(_TIER,)),
    MetricSpec("ziggurat_tier_occupancy_ratio", "gauge", "Used rows / capacity of a tier", labels=(_TIER,)),
    MetricSpec(
        "ziggurat_direct_rows",
        "gauge",
        "Rows of layers that have no slots and are read in place from the arena",
    ),
    MetricSpec("ziggurat_coverage_ratio", "gauge", "Pool slots / experts of the model"),
    MetricSpec(
        "ziggurat_pool_heat_ratio", "gauge", "Share of recent routings that went to experts in the pool"
    ),
    MetricSpec(
        "ziggurat_pool_heat_best_ratio",
        "gauge",
        "Share of recent routings that went to the hottest experts, as many as the pool has slots",
    ),
)


def markdown_table() -> str:
    """The metrics as a Markdown table, for the README."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{name}`={'/'.join(values)}" for name, values in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
