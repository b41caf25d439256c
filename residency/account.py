"""From what steps did to the numbers in the metrics buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ziggurat.residency.device_layer import LateCounts
from ziggurat.residency.fetch import SOURCES, Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.heat import HeatMap
from ziggurat.residency.host_cache import FillReport, HostCache
from ziggurat.residency.inline.choice import SERVINGS, Serving
from ziggurat.residency.inline.layers import InlineCounts
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import StepResult, StepState
from ziggurat.residency.slots import ABSENT, SlotPool

_HEAT_EVERY_STEPS = 16  # the heat gauges look at every expert


class Account:
    """Books steps, fetches and fills. Groups of numbers that belong together become visible together."""

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
        self._inline, self._booked = InlineCounts(), InlineCounts()

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
            self._add_fetches()
            self._set_gauges(with_heat=self._steps % _HEAT_EVERY_STEPS == 0)
        self._steps += 1

    def late_steps(self, late: LateCounts) -> None:
        """Book steps of one pass that nobody waited for."""
        add = self._metrics.add
        steps, pairs = len(late.pairs), int(late.pairs.sum())
        missed = 0 if late.missed is None else int(late.missed.sum())
        fetched = 0 if late.missed is None else int(np.count_nonzero(late.missed))
        with self._metrics.writing():
            add("ziggurat_routed_pairs_total", pairs)
            add("ziggurat_hit_pairs_total", pairs - missed)
            add("ziggurat_missed_pairs_total", missed)
            add("ziggurat_steps_total", steps - fetched, "clean")
            add("ziggurat_steps_total", fetched, "inline")
            add("ziggurat_steps_without_miss_total", steps - fetched)
            add("ziggurat_passes_total", steps)
            self._metrics.observe("ziggurat_step_passes", [1.0] * steps)
            self._add_inline()
            self._add_evictions()
            self._set_gauges(with_heat=True)

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

    def filled(self, report: FillReport) -> None:
        """Book what the background thread read into the arena."""
        add = self._metrics.add
        with self._metrics.writing():
            add("ziggurat_fetched_rows_total", report.read, "pack", "arena")
            add("ziggurat_fetched_bytes_total", report.read * self._cache.stride, "pack", "arena")
            add("ziggurat_io_errors_total", len(report.faults))
            add("ziggurat_verification_failures_total", sum(fault.verification for fault in report.faults))
            self._set_tier("arena", self._cache.capacity, self._cache.used)

    def direct(self, rows: int) -> None:
        """Rows that are read in place."""
        with self._metrics.writing():
            self._metrics.set("ziggurat_direct_rows", rows)

    def unarmed_call(self) -> None:
        with self._metrics.writing():
            self._metrics.add("ziggurat_unarmed_calls_total", 1)

    def gauges(self, *, with_heat: bool) -> None:
        """Set everything that is a level, not a count."""
        with self._metrics.writing():
            self._set_gauges(with_heat=with_heat)

    def _add_fetches(self) -> None:
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
        self._add_inline()
        self._add_evictions()

    def _add_inline(self) -> None:
        """What the device has done since it was looked at last."""
        add, now, before = self._metrics.add, self._inline, self._booked
        rows = now.rows - before.rows
        add("ziggurat_fetched_rows_total", rows, "arena", "pool")
        add("ziggurat_fetched_bytes_total", rows * self._cache.stride, "arena", "pool")
        add("ziggurat_inline_rows_total", rows)
        add("ziggurat_inline_bytes_total", rows * self._cache.stride)
        add("ziggurat_arena_misses_total", now.arena_misses - before.arena_misses)
        self._booked = replace(now)

    def _add_evictions(self) -> None:
        add = self._metrics.add
        for tier, evicted in (("pool", self._slots.evictions), ("arena", self._cache.evictions)):
            add("ziggurat_evictions_total", evicted - self._evicted[tier], tier)
            self._evicted[tier] = evicted

    def _set_gauges(self, *, with_heat: bool) -> None:
        put = self._metrics.set
        put("ziggurat_row_stride_bytes", self._cache.stride)
        put("ziggurat_coverage_ratio", min(1.0, self._slots.slots / self._geometry.rows))
        self._set_tier("pool", self._slots.slots, self._slots.used)
        self._set_tier("arena", self._cache.capacity, self._cache.used)
        if with_heat:
            put("ziggurat_pool_heat_ratio", self._heat.share(self._slots.table.numpy != ABSENT))
            put("ziggurat_pool_heat_best_ratio", self._heat.top_share(self._slots.slots))

    def _set_tier(self, tier: str, capacity: int, used: int) -> None:
        put = self._metrics.set
        put("ziggurat_tier_capacity_rows", capacity, tier)
        put("ziggurat_tier_used_rows", used, tier)
        put("ziggurat_tier_capacity_bytes", capacity * self._cache.stride, tier)
        put("ziggurat_tier_used_bytes", used * self._cache.stride, tier)
        put("ziggurat_tier_occupancy_ratio", used / capacity if capacity else 0.0, tier)
