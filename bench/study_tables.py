"""Tables of studies on recorded routing, which need no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu_tables import Markdown


def _origin(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return f"{machine['cpu']}, commit `{record['commit'][:10]}`: `{record['command']}`"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"


def admission_policy(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each trace, batch and pool; who chooses what to evict side by side."""
    names = list(result["runs"][0]["missed_share"])
    rows = [
        [
            f"{run['trace']}, {_tokens(run['tokens'])}, {run['coverage']:.0%}",
            f"{run['slots']}",
            *(f"{run['missed_share'][name]:.1%}" for name in names),
        ]
        for run in result["runs"]
    ]
    rules = result["rules"]
    note = (
        f"Share of a step's experts without a slot. `device`: {rules['candidates']} candidates, half-life of "
        f"{rules['half_life']} steps; `device C:H`: C candidates, half-life H."
    )
    table = markdown(["routing, batch, coverage", "slots", *names], rows)
    return f"{table}\n{note}\n\n{_origin(result)}\n"


def lookahead(result: Mapping[str, Any], markdown: Markdown) -> str:
    """One row for each batch, pool and kind of guess."""
    rows = []
    for run in result["runs"]:
        us = run["layer_us"]
        rows.append(
            [
                f"{_tokens(run['tokens'])}, {run['coverage']:.0%}, {run['moment']}, {run['guesses']} guesses",
                f"{run['recall']:.0%}",
                f"{run['missing_per_layer']:.2f}",
                f"{run['recall_missing']:.0%}",
                f"{run['wrong_per_layer']:.2f}",
                f"{us['without']:.0f} us",
                *(
                    f"{us[name]:.0f} us ({us[name] / us['without'] - 1:+.0%})"
                    for name in ("with", "cancelled", "perfect")
                ),
                f"{us['limit']:.0f} us",
            ]
        )
    header = [
        "batch, coverage, guess",
        "recall",
        "missing a layer",
        "of these guessed",
        "wrong rows a layer",
        "layer, no look-ahead",
        "with",
        "wrong ones cancelled",
        "if none were wrong",
        "limit",
    ]
    return f"{markdown(header, rows)}\n{_origin(result)}\n"
