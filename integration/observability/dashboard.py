"""The Grafana dashboard, as data.

    python -m ziggurat.integration.observability.dashboard > integration/observability/grafana/ziggurat.json

The committed file is what this gives; a test compares them and runs every query against a real Prometheus.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ziggurat.integration.observability.panels import Panel, placed, variables

_WHERE = 'job=~"$job", instance=~"$instance", rank=~"$rank"'


def _of(metric: str, *more: str) -> str:
    """A metric of what the variables choose."""
    return f"{metric}{{{', '.join([_WHERE, *more])}}}"


def _rate(metric: str, *more: str) -> str:
    return f"rate({_of(metric, *more)}[$__rate_interval])"


def _share(part: str, whole: str) -> str:
    return f"sum({part}) / (sum({whole}) > 0)"


def _quantile(q: float, histogram: str, *by: str) -> str:
    labels = ", ".join(["le", *by])
    return f"histogram_quantile({q}, sum by ({labels}) ({_rate(f'{histogram}_bucket')}))"


def _increase(metric: str) -> str:
    return f"sum(increase({_of(metric)}[1h]))"


_STEPS = _rate("ziggurat_steps_total")
_HITS, _MISSES = _rate("ziggurat_tier_hits_total"), _rate("ziggurat_tier_misses_total")
_INTO_POOL, _OVER_THE_LINK = 'target="pool"', 'target=~"pool|staging"'

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            Panel(
                "Zero-miss steps",
                "stat",
                "percentunit",
                ((_share(_rate("ziggurat_steps_without_miss_total"), _STEPS), ""),),
                width=4,
                height=4,
                description="Steps that found every expert in the pool. Decode speed follows this, not the hit ratio.",
                most=1,
            ),
            Panel(
                "Pool hits",
                "stat",
                "percentunit",
                (
                    (
                        _share(
                            _rate("ziggurat_hit_pairs_total"),
                            _rate("ziggurat_routed_pairs_total"),
                        ),
                        "",
                    ),
                ),
                width=4,
                height=4,
                most=1,
            ),
            Panel(
                "Repeated steps",
                "stat",
                "percentunit",
                ((_share(_rate("ziggurat_steps_total", 'outcome=~"replayed|exact"'), _STEPS), ""),),
                width=4,
                height=4,
                most=1,
            ),
            Panel(
                "Link in use",
                "stat",
                "percentunit",
                (
                    (
                        f"sum({_rate('ziggurat_fetched_bytes_total', _OVER_THE_LINK)})"
                        f" / sum({_of('ziggurat_link_bytes_per_second')})",
                        "",
                    ),
                ),
                width=4,
                height=4,
                description="Against what PCI Express carries by its standard; seven eighths of it can be reached.",
                most=1,
            ),
            Panel(
                "Errors in an hour",
                "stat",
                "short",
                (
                    (_increase("ziggurat_io_errors_total"), "reads"),
                    (_increase("ziggurat_verification_failures_total"), "checksums"),
                    (_increase("ziggurat_failed_tokens_total"), "tokens"),
                ),
                width=8,
                height=4,
            ),
        ),
    ),
    (
        "Steps",
        (
            Panel(
                "Steps by outcome",
                "timeseries",
                "ops",
                ((f"sum by (outcome) ({_STEPS})", "{{outcome}}"),),
                stacked=True,
            ),
            Panel(
                "Time of a step",
                "timeseries",
                "s",
                (
                    (_quantile(0.5, "ziggurat_step_seconds"), "median"),
                    (_quantile(0.99, "ziggurat_step_seconds"), "99 %"),
                ),
                description="Of steps that the host waited for.",
            ),
            Panel(
                "Where the time of a step goes",
                "timeseries",
                "s",
                (
                    (
                        f"sum by (part) ({_rate('ziggurat_step_part_seconds_total')})"
                        f" / ignoring (part) group_left sum({_rate('ziggurat_step_seconds_count')})",
                        "{{part}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Tokens",
                "timeseries",
                "ops",
                ((f"sum by (phase) ({_rate('ziggurat_tokens_total')})", "{{phase}}"),),
                stacked=True,
            ),
            Panel(
                "Passes of a step",
                "timeseries",
                "short",
                (
                    (
                        f"sum({_rate('ziggurat_step_passes_sum')}) / sum({_rate('ziggurat_step_passes_count')})",
                        "mean",
                    ),
                    (_quantile(0.99, "ziggurat_step_passes"), "99 %"),
                ),
            ),
            Panel(
                "Fetched rows for steps with prompts",
                "timeseries",
                "percentunit",
                (
                    (
                        _share(
                            _rate("ziggurat_prompt_fetched_rows_total"),
                            _rate("ziggurat_fetched_rows_total", _INTO_POOL),
                        ),
                        "share",
                    ),
                ),
                description="Near 1 while answers miss, too: prompts flood the pool.",
                most=1,
            ),
        ),
    ),
    (
        "Tiers",
        (
            Panel(
                "Hits by tier",
                "timeseries",
                "percentunit",
                ((f"sum by (tier) ({_HITS}) / (sum by (tier) ({_HITS} + {_MISSES}) > 0)", "{{tier}}"),),
                most=1,
            ),
            Panel(
                "Bytes moved",
                "timeseries",
                "Bps",
                (
                    (
                        f"sum by (source, target) ({_rate('ziggurat_fetched_bytes_total')})",
                        "{{source}} to {{target}}",
                    ),
                    (f"sum({_of('ziggurat_link_bytes_per_second')})", "link"),
                ),
            ),
            Panel(
                "Time to fetch a row",
                "timeseries",
                "s",
                (
                    (_quantile(0.5, "ziggurat_fetch_seconds", "source"), "{{source}}, median"),
                    (_quantile(0.99, "ziggurat_fetch_seconds", "source"), "{{source}}, 99 %"),
                ),
            ),
            Panel(
                "Rows held",
                "bargauge",
                "percentunit",
                ((f"avg by (tier) ({_of('ziggurat_tier_occupancy_ratio')})", "{{tier}}"),),
                most=1,
            ),
            Panel(
                "Queue",
                "timeseries",
                "short",
                (
                    (_quantile(0.99, "ziggurat_fetch_rows"), "rows of a fetch, 99 %"),
                    (f"sum({_of('ziggurat_fetching_rows')})", "rows on their way"),
                    (f"sum({_rate('ziggurat_arena_waits_total')})", "waits for a place, a second"),
                ),
            ),
            Panel(
                "Rows evicted",
                "timeseries",
                "ops",
                ((f"sum by (tier) ({_rate('ziggurat_evictions_total')})", "{{tier}}"),),
            ),
            Panel(
                "Rows read ahead",
                "timeseries",
                "ops",
                (
                    (f"sum by (by) ({_rate('ziggurat_read_ahead_rows_total')})", "{{by}}"),
                    (f"sum({_rate('ziggurat_read_ahead_used_rows_total')})", "used"),
                ),
            ),
            Panel(
                "Arena: preheat and sharing",
                "timeseries",
                "short",
                (
                    (f"sum({_of('ziggurat_preheat_rows')})", "rows to preheat"),
                    (f"sum by (role) ({_of('ziggurat_arena_share_ratio')})", "engines: {{role}}"),
                ),
                description="Engines with tiers.host.share: what they are to the arena (operations.md).",
            ),
            Panel(
                "Look-ahead: what was right",
                "timeseries",
                "percentunit",
                (
                    (
                        _share(
                            _rate("ziggurat_lookahead_wanted_rows_total"),
                            _rate("ziggurat_lookahead_guessed_rows_total"),
                        ),
                        "guessed rows that were wanted",
                    ),
                    (
                        _share(
                            _rate("ziggurat_lookahead_wanted_rows_total"),
                            _rate("ziggurat_inline_rows_total"),
                        ),
                        "wanted rows that were guessed",
                    ),
                ),
                description="Of engines with miss.lookahead; empty while nobody guesses (operations.md).",
                most=1,
            ),
            Panel(
                "Look-ahead: bytes",
                "timeseries",
                "Bps",
                (
                    (f"sum({_rate('ziggurat_lookahead_used_bytes_total')})", "used"),
                    (
                        f"sum({_rate('ziggurat_lookahead_fetched_bytes_total')}"
                        f" - {_rate('ziggurat_lookahead_used_bytes_total')})",
                        "wasted",
                    ),
                ),
                description="In whole chunks. What is wasted has taken the link from rows that were needed.",
                stacked=True,
            ),
        ),
    ),
    (
        "Disk",
        (
            Panel(
                "Bytes read from the pack",
                "timeseries",
                "Bps",
                ((f"sum({_rate('ziggurat_pack_read_bytes_total')})", "read"),),
            ),
            Panel(
                "Reads that failed in an hour",
                "timeseries",
                "short",
                (
                    (
                        f"sum by (reason) (increase({_of('ziggurat_failed_reads_total')}[1h]))",
                        "{{reason}}",
                    ),
                ),
                description="Also those whose row was then read again or made anew, so that no request failed.",
                stacked=True,
            ),
            Panel(
                "Damaged rows in an hour",
                "timeseries",
                "short",
                (
                    (_increase("ziggurat_reread_rows_total"), "read again"),
                    (_increase("ziggurat_quarantined_rows_total"), "quarantined"),
                    (
                        f"sum by (written_back) (increase({_of('ziggurat_rebuilt_rows_total')}[1h]))",
                        "made anew, written back: {{written_back}}",
                    ),
                    (_increase("ziggurat_io_errors_total"), "lost"),
                    (f"sum({_of('ziggurat_stuck_rows')})", "places that wait for a read, now"),
                ),
                description="A row that is lost fails the requests that need it. Places that wait are out of use.",
            ),
        ),
    ),
    (
        "Heat",
        (
            Panel(
                "Routings that the pool serves",
                "timeseries",
                "percentunit",
                (
                    (f"avg({_of('ziggurat_pool_heat_ratio')})", "pool"),
                    (f"avg({_of('ziggurat_pool_heat_best_ratio')})", "best pool of this size"),
                ),
                most=1,
            ),
            Panel(
                "Routings of the hottest experts",
                "bargauge",
                "percentunit",
                ((f"avg by (hottest) ({_of('ziggurat_heat_ratio')})", "hottest {{hottest}}"),),
                description="The coverage curve: how much a pool of that part of the experts could serve at best.",
                most=1,
            ),
            Panel(
                "Rows fetched by layer",
                "heatmap",
                "ops",
                ((f"sum by (layer) ({_rate('ziggurat_layer_fetched_rows_total')})", "{{layer}}"),),
            ),
            Panel(
                "Routings that the pool serves, by layer",
                "bargauge",
                "percentunit",
                ((f"avg by (layer) ({_of('ziggurat_layer_pool_heat_ratio')})", "{{layer}}"),),
                width=12,
                most=1,
            ),
            Panel(
                "Routings of the hottest tenth, by layer",
                "bargauge",
                "percentunit",
                ((f"avg by (layer) ({_of('ziggurat_layer_hottest_tenth_ratio')})", "{{layer}}"),),
                width=12,
                most=1,
            ),
        ),
    ),
    (
        "Set-up",
        (
            Panel(
                "Budget at start",
                "bargauge",
                "percentunit",
                (
                    (
                        f"max by (check) ({_of('ziggurat_budget_bytes')} / ({_of('ziggurat_limit_bytes')} > 0))",
                        "{{check}}",
                    ),
                ),
                description="Needed / there was. Floors are met by any ratio up to 1.",
                most=1,
            ),
            Panel(
                "Coverage",
                "stat",
                "percentunit",
                ((f"avg({_of('ziggurat_coverage_ratio')})", ""),),
                width=4,
                most=1,
            ),
            Panel(
                "Tiers and build",
                "table",
                "short",
                ((_of("ziggurat_tiers_info"), ""), (_of("ziggurat_build_info"), "")),
                width=12,
            ),
        ),
    ),
)


def queries() -> Iterator[tuple[str, str]]:
    """(title of the panel, PromQL) of every query, with Grafana's variables in it."""
    for _, panels in ROWS:
        for panel in panels:
            for expression, _ in panel.queries:
                yield panel.title, expression


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    return {
        "title": "Ziggurat",
        "uid": "ziggurat",
        "description": "Tiered experts: what the tiers hold, what misses cost, and where.",
        "tags": ["ziggurat", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(variables())},
        "panels": list(placed(ROWS)),
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] = ()) -> int:
    sys.stdout.write(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
