"""The table of tiers and vLLM's own offloaders over the same layers, from what `--parts decode offloaders` leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu_tables import Markdown, origin
from bench.inline_tables import bits, link_cell, links_beside, ratio_cell, said_of_links

_STOCK = {
    "none": "no offloader, without the tiers",
    "uva": "vLLM's UVA offloader",
    "prefetch": "vLLM's prefetch offloader",
}


def offloaders(result: Mapping[str, Any], markdown: Markdown) -> str:
    """A case and coverage after the other: inline, replay, and the offloaders at the same GPU memory."""
    rows: list[list[str]] = []
    settings: dict[str, None] = {}
    for case in result["cases"]:
        if "resident_ms" not in case:
            continue
        label, resident = case["label"], case["resident_ms"]["mean"]
        stock = case.get("stock", ())
        rows.append([f"{label}: all resident", "100%", f"{resident:.2f} ms", "1.00", *[""] * 5, "same"])
        rows += [_row(label, one, resident, one, "moved") for one in stock if one["offloader"] == "none"]
        for one in case.get("runs", ()):
            for mode in ("inline", "replay"):
                if mode in one:
                    at = {"coverage": one["coverage"], "gpu_share": one["coverage"], "name": mode}
                    rows.append(_row(label, at, resident, one[mode], "missed"))
            for other in stock:
                if other["coverage"] == one["coverage"] and other["offloader"] != "none":
                    rows.append(_row(label, other, resident, other, "moved"))
                    settings[
                        f"{other['coverage']:.0%} `{other['setting']}` ({other['offloaded_layers']} layers offloaded)"
                    ] = None
    beside = links_beside(result)
    header = [
        "routing: coverage, how",
        "rows on the GPU",
        "step",
        "of resident",
        "over the link",
        "link, GB/s",
        "on the link",
        "ratio",
        "of the limit",
        "bits",
    ]
    links = f" {said_of_links(result)}" if beside else ""
    notes = (
        f"{result['layers']} layers of {result['experts']} experts, top-{result['top_k']}, hidden {result['hidden']}, "
        f"intermediate {result['intermediate']}, `{result['codec']}` rows of {result['row_bytes'] / 2**20:.2f} MiB, "
        f"{result['dense_mb_per_layer']:.0f} MB of other weights a layer.{links} Mean times of a step; ratio: to the "
        "resident step plus what came over the link; of the limit: to the larger of the two. Steps are captured CUDA "
        f"graphs unless a line says eager. Offloaders: {'; '.join(settings) or 'none'}."
    )
    return f"{markdown(header, rows)}\n{notes}\n\n{origin(result)}\n"


def _row(
    label: str, where: Mapping[str, Any], resident: float, run: Mapping[str, Any], moved: str
) -> list[str]:
    name = where.get("name") or _STOCK[where["offloader"]]
    eager = "" if run.get("graph", True) else ", eager"
    step = run["step_ms"]["mean"]
    return [
        f"{label}: {where['coverage']:.0%}, {name}{eager}",
        f"{where['gpu_share']:.0%}",
        f"{step:.2f} ms",
        f"{step / resident:.2f}",
        f"{run[f'{moved}_mib_per_step']:.1f} MiB",
        link_cell(run),
        f"{run['link_ms']:.2f} ms" if "link_ms" in run else "",
        ratio_cell(run, "ratio"),
        ratio_cell(run, "limit_ratio"),
        bits(run),
    ]
