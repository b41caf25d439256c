"""A report about a recording of metrics: what a server's tiers did over a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from ziggurat.integration.observability.figures import Figures, duration, figures
from ziggurat.integration.observability.recording import Recording
from ziggurat.integration.observability.report.html import Figure, Report, table
from ziggurat.integration.observability.report.svg import (
    Line,
    amount,
    bar_chart,
    heat_map,
    line_chart,
    percent,
    plain,
)
from ziggurat.residency.metric_specs import HOTTEST
from ziggurat.residency.sizes import format_bytes

MOST_COLUMNS = 160
"""Intervals that a chart shows; longer recordings are put together to as many."""

_PARTS = {"first_pass": "first pass", "repeated_passes": "repeated passes", "fetch": "fetching rows"}


def recording_report(recording: Recording) -> Report:
    """The whole page."""
    pages = recording.pages
    each = max(1, -(-(len(pages) - 1) // MOST_COLUMNS))
    picked = [*pages[:-1:each], pages[-1]]
    intervals = [figures(before, after) for before, after in pairwise(picked)]
    whole = figures(pages[0], pages[-1])
    begun = pages[0].time
    times = [one.time - begun for one in intervals]
    setup = whole.setup
    return Report(
        title="Tiers over time",
        subtitle=(
            f"{recording.url} · {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC, {whole.seconds:.0f} s · "
            f"Ziggurat {setup['version']} · {setup['codec']} rows on {setup['device']} · {setup['layers']} layers × "
            f"{setup['experts']} experts, top {setup['top_k']} · {setup['eviction']}"
        ),
        numbers=[
            ("steps a second", plain(whole.steps_per_s)),
            ("tokens a second", plain(sum(whole.tokens_per_s.values()))),
            ("zero-miss steps", _ratio(whole.zero_miss_ratio)),
            ("hits in the pool", _ratio(whole.hit_ratio)),
            ("to the device", f"{format_bytes(round(sum(whole.fetched_bytes_per_s.values())))}/s"),
            ("median step", duration(whole.step_seconds.median)),
        ],
        figures=[
            _ratios(times, intervals),
            _coverage(whole),
            _layers(whole),
            _breakdown(times, intervals),
            _fetches(times, intervals),
            _speed(times, intervals),
            _heat(intervals),
            _table(whole),
        ],
    )


def _over_time(
    title: str,
    times: Sequence[float],
    lines: Sequence[tuple[str, Sequence[float | None], int]],
    y_format: Callable[[float], str],
    y_most: float | None = None,
) -> str:
    made = [Line(name, times, values, kind) for name, values, kind in lines]
    return line_chart(
        title,
        made,
        x_label="seconds",
        y_format=y_format,
        y_most=y_most,
        marks=len(times) <= 40,
    )


def _ratios(times: Sequence[float], intervals: Sequence[Figures]) -> Figure:
    chart = _over_time(
        "Hits and zero-miss steps",
        times,
        [
            ("hits in the pool", [one.hit_ratio for one in intervals], 0),
            ("hits in the arena", [one.tiers[1].hit_ratio for one in intervals], 2),
            ("zero-miss steps", [one.zero_miss_ratio for one in intervals], 1),
        ],
        percent,
        1.0,
    )
    caption = "The arena's hits are among the rows that the pool lacked. Gaps: nothing was looked up."
    return Figure("Hits and zero-miss steps", caption, chart)


def _coverage(whole: Figures) -> Figure:
    pool, known = whole.tiers[0], _is_known(whole)
    rows = float(whole.setup["layers"]) * float(whole.setup["experts"]) if known else 0.0
    points = {0.0: 0.0, **{part: whole.hottest[name] for name, part in HOTTEST}}
    if any(whole.hottest.values()):
        points[1.0] = 1.0
    lines = []
    if rows:
        coverage = min(1.0, pool.capacity_rows / whole.ranks / rows)
        points[coverage] = whole.pool_heat_best
        lines.append(Line("this pool", [coverage], [whole.pool_heat], 3))
    lines.insert(0, Line("the hottest experts", sorted(points), [points[part] for part in sorted(points)], 0))
    chart = line_chart(
        "Coverage",
        lines,
        x_label="experts, hottest first",
        x_format=percent,
        y_format=percent,
        y_most=1.0,
        marks=True,
    )
    caption = "Share of recent routings that a pool of that size could serve at best, and what this one does."
    return Figure("Coverage curve", caption, chart)


def _is_known(whole: Figures) -> bool:
    return whole.setup["layers"].isdecimal() and whole.setup["experts"].isdecimal()


def _layers(whole: Figures) -> Figure:
    steps = whole.steps_per_s or 1.0
    chart = bar_chart(
        "Misses by layer",
        [layer.layer for layer in whole.layers],
        {"rows a step": [layer.fetched_per_s / steps for layer in whole.layers]},
        x_label="layer",
    )
    return Figure("Misses by layer", "Rows fetched into the pool, a step.", chart)


def _breakdown(times: Sequence[float], intervals: Sequence[Figures]) -> Figure:
    parts = {
        name: [one.step_parts.get(part, 0.0) * 1e3 for one in intervals] for part, name in _PARTS.items()
    }
    chart = bar_chart(
        "Time of a step",
        [f"{time:.0f}" for time in times],
        parts,
        x_label="seconds",
        y_format=lambda value: f"{plain(value)} ms",
        kinds=(2, 1, 3),
    )
    caption = (
        "Mean of the steps that the host waited for; rows that kernels gather themselves are in the passes."
    )
    return Figure("Where the time of a step goes", caption, chart)


def _fetches(times: Sequence[float], intervals: Sequence[Figures]) -> Figure:
    chart = _over_time(
        "Bytes to the device",
        times,
        [
            ("from the arena", [one.fetched_bytes_per_s.get("arena", 0.0) for one in intervals], 0),
            ("from the pack", [one.fetched_bytes_per_s.get("pack", 0.0) for one in intervals], 3),
        ],
        amount,
    )
    link = intervals[-1].link_bytes_per_s
    said = f"The link carries {amount(link)} by its standard." if link else ""
    return Figure("Bytes to the device", f"A second. {said}".strip(), chart)


def _speed(times: Sequence[float], intervals: Sequence[Figures]) -> Figure:
    phases = {"decode": 0, "prefill": 1, "untold": 5}
    chart = _over_time(
        "Tokens a second",
        times,
        [
            (phase, [one.tokens_per_s.get(phase, 0.0) for one in intervals], kind)
            for phase, kind in phases.items()
            if any(one.tokens_per_s.get(phase, 0.0) for one in intervals)
        ],
        plain,
    )
    return Figure("Tokens a second", "Of answers (decode) and of prompts (prefill).", chart)


def _heat(intervals: Sequence[Figures]) -> Figure:
    layers = [layer.layer for layer in intervals[-1].layers]
    busiest = [[layer.fetched_per_s / (one.steps_per_s or 1.0) for layer in one.layers] for one in intervals]
    columns = [column for column in busiest if len(column) == len(layers)]
    values = [[column[row] for column in columns] for row in range(len(layers))]
    chart = heat_map(
        "Misses over time",
        layers,
        values,
        x_label="time",
        x_ends=("begin", "end"),
        scale=lambda value: f"{plain(value)} rows",
    )
    caption = "A row is a layer, a column an interval: rows fetched, a step."
    return Figure("Heat map of misses", caption, chart, wide=True)


def _table(whole: Figures) -> Figure:
    rows = [
        [
            tier.name,
            f"{tier.used_rows:.0f} / {tier.capacity_rows:.0f}",
            format_bytes(round(tier.used_bytes)),
            _ratio(tier.hit_ratio),
            f"{tier.evictions_per_s:.1f}/s",
        ]
        for tier in whole.tiers
    ]
    tiers = table(["tier", "rows", "bytes", "hits", "evicted"], rows)
    fetches = table(
        ["a row from", "median", "99 %"],
        [
            [source, duration(latency.median), duration(latency.p99)]
            for source, latency in whole.fetch_seconds.items()
        ],
    )
    names = {
        "reads": "rows not read",
        "checksums": "damaged rows",
        "tokens": "failed tokens",
        "reread": "rows read twice",
        "rebuilt": "rows made anew",
    }
    errors = table(["since the start", ""], [[names[n], f"{count:.0f}"] for n, count in whole.errors.items()])
    body = f'<div class="tables">{tiers}{fetches}{errors}</div>'
    return Figure("Tiers at the end", "Hits and evictions are of the whole recording.", body, wide=True)


def _ratio(value: float | None) -> str:
    return "–" if value is None else percent(value)
