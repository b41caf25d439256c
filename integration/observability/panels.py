"""Panels in Grafana's JSON model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


def variables() -> Iterator[dict[str, Any]]:
    """What is chosen at the top: data source, job, instance, rank."""
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


def placed(rows: Sequence[tuple[str, Sequence[Panel]]]) -> Iterator[dict[str, Any]]:
    """The panels of (title, panels) rows, each with its place in the grid."""
    number, top = 0, 0
    for title, panels in rows:
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
