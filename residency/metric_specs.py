"""Every metric of the service: name, type, labels, meaning. Exporters and docs/metrics.md come from this list."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from ziggurat.residency.inline.choice import SERVINGS
from ziggurat.residency.passes import OUTCOMES
from ziggurat.stores.counts import FAILED_READS

Kind = Literal["counter", "gauge", "histogram", "info"]

MAX_LAYERS = 128
"""MoE layers of a model that have series of their own; those beyond it are only in the sums."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """labels: (label, its possible values) in order. bounds: upper bucket bounds of a histogram, ascending.

    per_layer: a counter or gauge with one series for each MoE layer, under the label `layer`, the model's own number.
    optional: a gauge that is not exported until it is set. An info has the value 1; the values of its labels are set at
    start.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bounds: tuple[float, ...] = ()
    per_layer: bool = False
    optional: bool = False

    @property
    def words(self) -> int:
        """8-byte cells of one series: a histogram has its buckets, one for the rest, and its sum."""
        if self.kind == "info":
            return 0
        if self.per_layer:
            return MAX_LAYERS
        return len(self.bounds) + 2 if self.kind == "histogram" else 1

    @property
    def role(self) -> str:
        """How it is written: its kind, "seconds" for a counter of seconds, "layer counter" or "layer gauge"."""
        if self.per_layer:
            return f"layer {self.kind}"
        return "seconds" if self.kind == "counter" and self.name.endswith("_seconds_total") else self.kind

    def series(self, layers: int) -> int:
        """Series of one rank of a model with so many MoE layers, as Prometheus counts them."""
        if self.kind == "info":
            return 1
        combinations = prod(len(values) for _, values in self.labels)
        if self.kind == "histogram":
            return combinations * (len(self.bounds) + 3)  # the +Inf bucket, the sum and the count
        return combinations * (min(layers, MAX_LAYERS) if self.per_layer else 1)


_TIER = ("tier", ("pool", "arena"))
_LADDER = (("tier", ("pool", "arena", "pack")),)
_ROUTE = (("source", ("arena", "pack")), ("target", ("pool", "arena", "staging")))
_SOURCE = (("source", ("arena", "pack")),)
READ_AHEAD = ("start", "heat", "pool", "layers")
SHARES = ("writer", "reader", "orphan", "own")
PHASES = ("prefill", "decode", "untold")
WRITTEN_BACK = ("yes", "no")
STEP_PARTS = ("first_pass", "repeated_passes", "fetch")
HOTTEST = (("1%", 0.01), ("5%", 0.05), ("10%", 0.10), ("25%", 0.25), ("50%", 0.50))
"""Parts of the experts, hottest first, whose share of the routings is exported."""
HOTTEST_TENTH = 0.10
"""The part of a layer's experts whose share of its routings is exported."""
BUDGET = (
    "arena floor",
    "arena process",
    "arena size",
    "cgroup memory",
    "device memory",
    "disk space",
    "host memory",
    "locked memory",
    "NUMA node memory",
    "pool floor",
    "staging floor",
)
"""What the budget is checked for; checks of single NUMA nodes are one, by the tightest node."""
_BUDGET = (("check", BUDGET),)
_SECONDS = tuple(m * 10.0**e for e in range(-5, 1) for m in (1.0, 2.5, 5.0))[:-2]
_STEP_SECONDS = tuple(m * 10.0**e for e in range(-4, 1) for m in (1.0, 2.5, 5.0))
_ROWS = tuple(4.0**e for e in range(7))
_PASSES = (1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0)


def _texts(*names: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Labels whose values are texts that are set at start."""
    return tuple((name, ()) for name in names)


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
    MetricSpec(
        "ziggurat_tier_hits_total",
        "counter",
        "Look-ups that a tier answered: routed pairs in the pool, rows in the arena and the pack",
        labels=_LADDER,
    ),
    MetricSpec(
        "ziggurat_tier_misses_total",
        "counter",
        "Look-ups that a tier passed on, or could not answer in the case of the pack",
        labels=_LADDER,
    ),
    MetricSpec(
        "ziggurat_tokens_total",
        "counter",
        "Live tokens of finished steps; untold: of steps that nobody waited for, which tell no prompts apart",
        labels=(("phase", PHASES),),
    ),
    MetricSpec("ziggurat_steps_total", "counter", "Steps by how they ended", labels=(("outcome", OUTCOMES),)),
    MetricSpec("ziggurat_steps_without_miss_total", "counter", "Steps that found every expert in the pool"),
    MetricSpec("ziggurat_passes_total", "counter", "Forward passes"),
    MetricSpec("ziggurat_replay_passes_total", "counter", "Forward passes after the first one of a step"),
    MetricSpec("ziggurat_step_passes", "histogram", "Forward passes that a step took", bounds=_PASSES),
    MetricSpec(
        "ziggurat_step_seconds",
        "histogram",
        "Time of a step, of those that the host waited for",
        bounds=_STEP_SECONDS,
    ),
    MetricSpec(
        "ziggurat_step_part_seconds_total",
        "counter",
        "The same by part: the first pass, later passes, and rows that the host fetched meanwhile",
        labels=(("part", STEP_PARTS),),
    ),
    MetricSpec("ziggurat_prompt_steps_total", "counter", "Steps with tokens of a prompt among theirs"),
    MetricSpec("ziggurat_prompt_fetched_rows_total", "counter", "Rows that such steps brought into the pool"),
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
        "Time in which the host brought one row into the pool, read and copy",
        labels=_SOURCE,
        bounds=_SECONDS,
    ),
    MetricSpec(
        "ziggurat_fetch_rows",
        "histogram",
        "Rows that the host asked for at once: the queue's depth",
        bounds=_ROWS,
    ),
    MetricSpec("ziggurat_fetching_rows", "gauge", "Rows that the host is bringing at this moment"),
    MetricSpec(
        "ziggurat_arena_waits_total", "counter", "Requests that found no place in the arena and had to wait"
    ),
    MetricSpec(
        "ziggurat_read_ahead_rows_total",
        "counter",
        "Rows read before anybody asked: at the start, by heat, for having left the pool, ahead of a long prompt",
        labels=(("by", READ_AHEAD),),
    ),
    MetricSpec(
        "ziggurat_read_ahead_used_rows_total", "counter", "Those of them that somebody asked for then"
    ),
    MetricSpec(
        "ziggurat_inline_rows_total",
        "counter",
        "Rows that a GPU fetched from the arena by itself while a step ran; also counted as moved from arena to pool",
    ),
    MetricSpec("ziggurat_inline_bytes_total", "counter", "Their bytes: rows x row stride"),
    MetricSpec(
        "ziggurat_lookahead_guessed_rows_total",
        "counter",
        "Rows that were not in the pool and that a layer chose to fetch because it guessed them for the next one"
        " (miss.lookahead)",
    ),
    MetricSpec(
        "ziggurat_lookahead_wanted_rows_total",
        "counter",
        "Those of them that the next layer then missed, so that they were worth fetching",
    ),
    MetricSpec(
        "ziggurat_lookahead_fetched_bytes_total",
        "counter",
        "Bytes that guesses took from the arena, in whole chunks of 32 KiB: at most that many, since a row's last chunk"
        " may be smaller",
    ),
    MetricSpec(
        "ziggurat_lookahead_used_bytes_total",
        "counter",
        "Those of them that were of wanted rows and that nobody had to fetch again, counted likewise; the others were"
        " wasted",
    ),
    MetricSpec(
        "ziggurat_arena_misses_total",
        "counter",
        "Rows that a GPU wanted to fetch by itself and that were not in the arena",
    ),
    MetricSpec(
        "ziggurat_arena_share_ratio",
        "gauge",
        "1 for what an engine with tiers.host.share is to the arena: its writer, a reader, an orphan whose arena"
        " process is gone, or the owner of an arena of its own, since there was no shared one to be had",
        labels=(("role", SHARES),),
    ),
    MetricSpec(
        "ziggurat_arena_adopted_rows", "gauge", "Rows that were in the arena's memory when this engine began"
    ),
    MetricSpec(
        "ziggurat_preheat_rows",
        "gauge",
        "Rows that the start still wants to read into the arena, in the background",
    ),
    MetricSpec("ziggurat_evictions_total", "counter", "Rows that had to leave a tier", labels=(_TIER,)),
    MetricSpec("ziggurat_io_errors_total", "counter", "Rows that could not be read from the pack"),
    MetricSpec(
        "ziggurat_verification_failures_total",
        "counter",
        "Rows whose checksum did not match, also after a re-read",
    ),
    MetricSpec(
        "ziggurat_pack_read_bytes_total", "counter", "Bytes that reads of the pack brought, good or not"
    ),
    MetricSpec(
        "ziggurat_failed_reads_total",
        "counter",
        "Reads of a row that failed, also where the row was got in another way afterwards: the system said no, too "
        "little arrived, the checksum differs, or there was no answer in time",
        labels=(("reason", FAILED_READS),),
    ),
    MetricSpec(
        "ziggurat_stuck_rows",
        "gauge",
        "Places in host memory that are out of use, since a read that was given up has not returned",
    ),
    MetricSpec("ziggurat_reread_rows_total", "counter", "Rows read again, from the disk past the page cache"),
    MetricSpec(
        "ziggurat_quarantined_rows_total",
        "counter",
        "Rows whose checksum differed, and that are checked at every read until they were good once",
    ),
    MetricSpec(
        "ziggurat_rebuilt_rows_total",
        "counter",
        "Rows made anew from the checkpoint, by whether they are right on the disk again",
        labels=(("written_back", WRITTEN_BACK),),
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
    MetricSpec("ziggurat_tier_floor_rows", "gauge", "Rows that a tier needs to work at all", labels=(_TIER,)),
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
    MetricSpec(
        "ziggurat_heat_ratio",
        "gauge",
        "Share of recent routings that went to the hottest part of all experts",
        labels=(("hottest", tuple(name for name, _ in HOTTEST)),),
    ),
    MetricSpec(
        "ziggurat_layer_fetched_rows_total", "counter", "Rows of a layer moved into the pool", per_layer=True
    ),
    MetricSpec(
        "ziggurat_layer_pool_heat_ratio",
        "gauge",
        "Share of a layer's recent routings that went to experts in the pool",
        per_layer=True,
    ),
    MetricSpec(
        "ziggurat_layer_hottest_tenth_ratio",
        "gauge",
        "Share of a layer's recent routings that went to the hottest tenth of its experts",
        per_layer=True,
    ),
    MetricSpec(
        "ziggurat_budget_bytes",
        "gauge",
        "What the budget needed at start, by check; a check that did not apply is absent",
        labels=_BUDGET,
        optional=True,
    ),
    MetricSpec(
        "ziggurat_limit_bytes",
        "gauge",
        "What there was for it",
        labels=_BUDGET,
        optional=True,
    ),
    MetricSpec(
        "ziggurat_link_bytes_per_second",
        "gauge",
        "What the GPU's PCI Express link can carry by its standard; absent where it is not known",
        optional=True,
    ),
    MetricSpec(
        "ziggurat_tiers_info",
        "info",
        "How the tiers are set up",
        labels=_texts(
            "codec",
            "device",
            "eviction",
            "host_eviction",
            "miss_mode",
            "lookahead",
            "layers",
            "experts",
            "top_k",
        ),
    ),
    MetricSpec(
        "ziggurat_build_info",
        "info",
        "Releases that this process runs",
        labels=_texts("version", "python", "torch", "vllm"),
    ),
)


def markdown_table() -> str:
    """The metrics as a Markdown table, for docs/metrics.md."""
    rows = ["| metric | type | labels | series | meaning |", "|---|---|---|---:|---|"]
    for spec in METRICS:
        labels = [f"`{name}`" + (f"={'/'.join(values)}" if values else "") for name, values in spec.labels]
        one = str(spec.series(1)) if not spec.per_layer else f"{spec.series(1)} × layers"
        if spec.per_layer:
            labels.append("`layer`")
        rows.append(f"| `{spec.name}` | {spec.kind} | {', '.join(labels)} | {one} | {spec.help} |")
    fixed = sum(spec.series(0) for spec in METRICS)
    each = sum(spec.series(1) for spec in METRICS) - fixed
    most = sum(spec.series(MAX_LAYERS) for spec in METRICS)
    rows += [
        "",
        f"Series of one rank: at most {fixed} and {each} for each MoE layer, of which {MAX_LAYERS} at most have series "
        f"of their own: {most} at the very most, {fixed + 43 * each} for a model with 43 layers. Beside the labels "
        "here each has `rank`. No label has values that requests, users or time could add to.",
    ]
    return "\n".join(rows) + "\n"
