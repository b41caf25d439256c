"""The Grafana dashboard, as data.

    python -m ziggurat.integration.observability.dashboard > integration/observability/grafana/ziggurat.json

The committed file is what this gives; a test compares them and runs every query against a real Prometheus.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_WHERE = 'job=~"$job", instance=~"$instance", rank=~"$rank"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. queries: (PromQL, legend). kind: Grafana's panel type. width, height: in its grid of 24 columns."""

    title: str
    kind: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    height: int = 8
    description: str = ""
    stacked: bool = False
    most: float | None = None


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
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }
    filters = ""
    for name in ("job", "instance", "rank"):
        query = f"label_values(ziggurat_row_stride_bytes{{{filters}}}, {name})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 3,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        filters += f'{", " if filters else ""}{name}=~"${name}"'


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        top += 1
        left, height = 0, 0
        for panel in panels:
            if left + panel.width > 24:
                top, left, height = top + height, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left, height = left + panel.width, max(height, panel.height)
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 20 if panel.stacked else 0, "lineWidth": 1, "showPoints": "never"}
        if panel.stacked:
            custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    instant = panel.kind in ("bargauge", "table")
    return {
        "title": panel.title,
        "type": panel.kind,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    if kind == "bargauge":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "orientation": "horizontal",
            "displayMode": "basic",
        }
    if kind == "heatmap":
        return {"calculate": False, "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64}}
    if kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {}


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] = ()) -> int:
    sys.stdout.write(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
