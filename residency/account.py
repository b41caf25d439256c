"""From what steps did to the numbers in the metrics buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ziggurat.kernels.lookahead import CHUNK_BYTES
from ziggurat.residency.fetch import SOURCES, Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.heat import HeatMap
from ziggurat.residency.host_cache import FillReport, HostCache
from ziggurat.residency.inline.choice import SERVINGS, Serving
from ziggurat.residency.inline.layers import InlineCounts
from ziggurat.residency.late_passes import LateCounts
from ziggurat.residency.layer_figures import set_heat
from ziggurat.residency.ledger import Ledger
from ziggurat.residency.metric_specs import SHARES
from ziggurat.residency.metrics import MetricWriter, TierMetrics
from ziggurat.residency.pack_books import PackBooks
from ziggurat.residency.passes import StepResult, StepState
from ziggurat.residency.slots import ABSENT, SlotPool

_HEAT_EVERY_STEPS = 16  # the heat gauges look at every expert


class Account:
    """Books steps, fetches and fills. Groups of numbers that belong together become visible together.

    `late_steps` and `filled` may be called by any thread, everything else by the one that runs steps. `step`, `fetches`
    and `late_steps` must not overlap: what they have booked already is theirs together.
    """

    def __init__(
        self,
        metrics: TierMetrics,
        geometry: ServiceGeometry,
        slots: SlotPool,
        cache: HostCache,
        fetcher: Fetcher,
        heat: HeatMap,
    ) -> None:
        self._metrics = metrics
        self._geometry = geometry
        self._slots = slots
        self._cache = cache
        self._fetcher = fetcher
        self._heat = heat
        self._steps = 0
        self._evicted = {"pool": 0, "arena": 0}
        self._waits = 0
        self._ahead_used = 0
        self._pack = PackBooks(cache)
        fetcher.on_depth = self._fetching
        self._inline = InlineCounts.of(geometry.layers)
        self._booked = InlineCounts.of(geometry.layers)

    def step(self, step: StepState, result: StepResult[Any]) -> None:
        """Book one finished step."""
        add = self._metrics.add
        with self._metrics.writing():
            add("ziggurat_routed_pairs_total", step.routed_pairs)
            add("ziggurat_hit_pairs_total", step.routed_pairs - step.missed_pairs)
            add("ziggurat_missed_pairs_total", step.missed_pairs)
            add("ziggurat_replay_routed_pairs_total", step.replay_routed_pairs)
            add("ziggurat_replay_missed_pairs_total", step.replay_missed_pairs)
            add("ziggurat_steps_total", 1, result.outcome)
            add("ziggurat_steps_without_miss_total", int(step.missed_pairs == 0))
            add("ziggurat_passes_total", result.passes)
            add("ziggurat_replay_passes_total", result.passes - 1)
            self._metrics.observe("ziggurat_step_passes", [float(result.passes)])
            if result.failed_tokens is not None:
                add("ziggurat_failed_tokens_total", int(result.failed_tokens.sum()))
            add("ziggurat_tier_hits_total", step.routed_pairs - step.missed_pairs, "pool")
            add("ziggurat_tier_misses_total", step.missed_pairs, "pool")
            self._add_time(step)
            fetched = self._add_fetches()
            self._add_tokens(step, fetched)
            self._set_gauges(self._metrics, with_heat=self._steps % _HEAT_EVERY_STEPS == 0)
        self._steps += 1

    def late_steps(self, late: LateCounts) -> None:
        """Book steps of one pass that nobody waited for."""
        behind = self._metrics.behind
        add = behind.add
        steps, pairs, missed, fetched = late.steps, int(late.pairs.sum()), late.missed, late.fetching
        with behind.writing():
            add("ziggurat_routed_pairs_total", pairs)
            add("ziggurat_hit_pairs_total", pairs - missed)
            add("ziggurat_missed_pairs_total", missed)
            add("ziggurat_tier_hits_total", pairs - missed, "pool")
            add("ziggurat_tier_misses_total", missed, "pool")
            add("ziggurat_tokens_total", pairs // (self._geometry.layers * self._geometry.top_k), "untold")
            add("ziggurat_steps_total", steps - fetched, "clean")
            add("ziggurat_steps_total", fetched, "inline")
            add("ziggurat_steps_without_miss_total", steps - fetched)
            add("ziggurat_passes_total", steps)
            behind.observe("ziggurat_step_passes", [1.0] * steps)
            self._add_inline(behind)
            self._add_evictions(behind)
            self._pack.book(behind)
            self._set_gauges(behind, with_heat=True)

    def serving(self, chosen: Serving) -> None:
        """Who serves misses."""
        with self._metrics.writing():
            for one in SERVINGS:
                self._metrics.set("ziggurat_miss_serving_ratio", float(one == chosen), one)

    def follow(self, counts: InlineCounts) -> None:
        """Book what a device does by itself from here on."""
        self._inline = counts

    def fetches(self) -> None:
        """Book fetches outside a step."""
        with self._metrics.writing():
            self._add_fetches()

    def filled(self, report: FillReport, by: str | None = None) -> None:
        """Book what was read into the arena. by: for what reason, of READ_AHEAD, if nobody waited for it."""
        behind = self._metrics.behind
        add = behind.add
        with behind.writing():
            if by is not None:
                add("ziggurat_read_ahead_rows_total", report.read, by)
            add("ziggurat_fetched_rows_total", report.read, "pack", "arena")
            add("ziggurat_fetched_bytes_total", report.read * self._cache.stride, "pack", "arena")
            add("ziggurat_io_errors_total", len(report.faults))
            add("ziggurat_verification_failures_total", sum(fault.verification for fault in report.faults))
            add("ziggurat_tier_hits_total", report.read, "pack")
            add("ziggurat_tier_misses_total", len(report.faults), "pack")
            self._pack.book(behind)
            self._set_arena(behind)

    def read_ahead(self, by: str, rows: int) -> None:
        """Book rows that were read early and not into the arena."""
        behind = self._metrics.behind
        with behind.writing():
            behind.add("ziggurat_read_ahead_rows_total", rows, by)

    def direct(self, rows: int) -> None:
        """Rows that are read in place."""
        with self._metrics.writing():
            self._metrics.set("ziggurat_direct_rows", rows)

    def sharing(self, ledger: Ledger | None, *, wanted: bool, adopted: int) -> None:
        """What this engine is to a shared arena, now and when the arena process is gone. wanted: it was asked for."""
        if not wanted:
            return

        def show() -> None:
            role = "own" if ledger is None else ledger.role
            with self._metrics.behind.writing():
                for one in SHARES:
                    self._metrics.behind.set("ziggurat_arena_share_ratio", float(one == role), one)

        show()
        with self._metrics.behind.writing():
            self._metrics.behind.set("ziggurat_arena_adopted_rows", adopted)
        if ledger is not None:
            ledger.when_lost(show)

    def preheating(self, rows: int) -> None:
        """Rows that the background thread of a start has still to look at."""
        with self._metrics.behind.writing():
            self._metrics.behind.set("ziggurat_preheat_rows", rows)

    def unarmed_call(self) -> None:
        with self._metrics.writing():
            self._metrics.add("ziggurat_unarmed_calls_total", 1)

    def gauges(self, *, with_heat: bool) -> None:
        """Set everything that is a level, not a count."""
        with self._metrics.writing():
            self._set_gauges(self._metrics, with_heat=with_heat)

    def _fetching(self, rows: int) -> None:
        """One word on its own, so that a scrape in the middle of a fetch sees it."""
        self._metrics.set("ziggurat_fetching_rows", rows)

    def _add_time(self, step: StepState) -> None:
        if step.seconds:
            self._metrics.observe("ziggurat_step_seconds", [sum(step.seconds.values())])
            for part, seconds in step.seconds.items():
                self._metrics.add_seconds("ziggurat_step_part_seconds_total", seconds, part)

    def _add_tokens(self, step: StepState, fetched: int) -> None:
        """Tokens by phase, and what steps with a prompt among theirs have fetched."""
        add, prefill = self._metrics.add, step.tokens.prefill
        prompt = 0 if prefill is None else int(prefill.sum())
        add("ziggurat_tokens_total", prompt, "prefill")
        add("ziggurat_tokens_total", step.tokens.count - prompt, "decode")
        if prompt:
            add("ziggurat_prompt_steps_total", 1)
            add("ziggurat_prompt_fetched_rows_total", fetched)

    def _add_fetches(self) -> int:
        """Book what was fetched since the last time; how many rows came into the pool."""
        add = self._metrics.add
        tally = self._fetcher.take_tally()
        for source in SOURCES:
            rows = tally.rows[source]
            add("ziggurat_fetched_rows_total", rows, source, "pool")
            add("ziggurat_fetched_bytes_total", rows * self._cache.stride, source, "pool")
            add("ziggurat_fetched_rows_total", tally.staged[source], source, "staging")
            add("ziggurat_fetched_bytes_total", tally.staged[source] * self._cache.stride, source, "staging")
            self._metrics.observe("ziggurat_fetch_seconds", tally.seconds[source], source)
        add("ziggurat_io_errors_total", tally.io_errors)
        add("ziggurat_verification_failures_total", tally.verification_failures)
        looked_up = {source: tally.rows[source] + tally.staged[source] for source in SOURCES}
        add("ziggurat_tier_hits_total", looked_up["arena"], "arena")
        add("ziggurat_tier_misses_total", looked_up["pack"] + tally.io_errors, "arena")
        add("ziggurat_tier_hits_total", looked_up["pack"], "pack")
        add("ziggurat_tier_misses_total", tally.io_errors, "pack")
        self._metrics.observe("ziggurat_fetch_rows", tally.asked)
        if tally.keys:
            layers = np.array(tally.keys) // self._geometry.experts
            by_layer = np.bincount(layers, minlength=self._geometry.layers)
            self._metrics.add_layers("ziggurat_layer_fetched_rows_total", by_layer)
        inline = self._add_inline(self._metrics)
        self._add_evictions(self._metrics)
        self._pack.book(self._metrics)
        return inline + sum(tally.rows.values())

    def _add_inline(self, writer: MetricWriter) -> int:
        """What the device has done since it was looked at last; how many rows it brought into the pool."""
        add, now, before = writer.add, self._inline, self._booked
        rows, misses = now.rows - before.rows, now.arena_misses - before.arena_misses
        add("ziggurat_fetched_rows_total", rows, "arena", "pool")
        add("ziggurat_fetched_bytes_total", rows * self._cache.stride, "arena", "pool")
        add("ziggurat_inline_rows_total", rows)
        add("ziggurat_inline_bytes_total", rows * self._cache.stride)
        add("ziggurat_arena_misses_total", misses)
        add("ziggurat_tier_hits_total", rows, "arena")
        add("ziggurat_tier_misses_total", misses, "arena")
        ahead = now.ahead.since(before.ahead)
        add("ziggurat_lookahead_guessed_rows_total", ahead.guessed)
        add("ziggurat_lookahead_wanted_rows_total", ahead.matched)
        add("ziggurat_lookahead_fetched_bytes_total", ahead.fetched * CHUNK_BYTES)
        add("ziggurat_lookahead_used_bytes_total", ahead.used * CHUNK_BYTES)
        if rows:
            writer.add_layers("ziggurat_layer_fetched_rows_total", now.by_layer - before.by_layer)
            self._booked = replace(now, by_layer=now.by_layer.copy())
        else:
            self._booked = replace(now, by_layer=before.by_layer)
        return rows

    def _add_evictions(self, writer: MetricWriter) -> None:
        add = writer.add
        for tier, evicted in (("pool", self._slots.evictions), ("arena", self._cache.evictions)):
            add("ziggurat_evictions_total", evicted - self._evicted[tier], tier)
            self._evicted[tier] = evicted
        add("ziggurat_read_ahead_used_rows_total", self._cache.ahead_used - self._ahead_used)
        self._ahead_used = self._cache.ahead_used
        add("ziggurat_arena_waits_total", self._cache.waits - self._waits)
        self._waits = self._cache.waits

    def _set_gauges(self, writer: MetricWriter, *, with_heat: bool) -> None:
        put = writer.set
        put("ziggurat_row_stride_bytes", self._cache.stride)
        put("ziggurat_coverage_ratio", min(1.0, self._slots.slots / self._geometry.rows))
        self._set_tier(writer, "pool", self._slots.slots, self._slots.used)
        self._set_arena(writer)
        if with_heat:
            set_heat(writer, self._heat.counts, self._slots.table.numpy != ABSENT, self._slots.slots)

    def _set_arena(self, writer: MetricWriter) -> None:
        self._set_tier(writer, "arena", self._cache.capacity, self._cache.used)
        writer.set("ziggurat_stuck_rows", self._cache.stuck)

    def _set_tier(self, writer: MetricWriter, tier: str, capacity: int, used: int) -> None:
        put = writer.set
        put("ziggurat_tier_capacity_rows", capacity, tier)
        put("ziggurat_tier_used_rows", used, tier)
        put("ziggurat_tier_capacity_bytes", capacity * self._cache.stride, tier)
        put("ziggurat_tier_used_bytes", used * self._cache.stride, tier)
        put("ziggurat_tier_occupancy_ratio", used / capacity if capacity else 0.0, tier)
