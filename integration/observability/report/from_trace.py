"""A report about a routing trace: how the experts are used, and what pools of all sizes would make of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ziggurat.integration.observability.report.html import Figure, Report, table
from ziggurat.integration.observability.report.lru import LruCurve, lru_curve
from ziggurat.integration.observability.report.svg import (
    Line,
    bar_chart,
    heat_map,
    line_chart,
    percent,
    plain,
)
from ziggurat.residency.sizes import format_bytes

COVERAGES = (0.10, 0.19, 0.25, 0.50)
"""Parts of the experts that tables and bars are for."""


class TraceError(Exception):
    """A file that holds no trace."""


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """tokens: int [N, L, k], all tokens of all sequences, one sequence after the other. layers: their numbers."""

    name: str
    tokens: npt.NDArray[np.integer]
    experts: int
    layers: tuple[str, ...]
    sequences: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step is predicted with. row_bytes: of one expert; link: bytes a second; resident: seconds of a step that
    misses nothing."""

    row_bytes: int
    link: float
    resident: float


def load_trace(path: Path) -> RoutingTrace:
    """An .npz with `topk_ids` (or `ids`) [sequence, position, layer, k] and, if sequences are padded, `lengths`; the
    layers' numbers are those of `metadata`, a JSON object as UTF-8 bytes, if the file has it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            name = next((name for name in ("topk_ids", "ids") if name in file.files), None)
            if name is None:
                raise TraceError(f"{path.name} holds {', '.join(file.files)}, but neither topk_ids nor ids")
            ids = file[name]
            lengths = file["lengths"] if "lengths" in file.files else None
            metadata = json.loads(file["metadata"].tobytes()) if "metadata" in file.files else {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path.name} is no trace: {error}") from error
    if ids.ndim != 4 or not ids.size or ids.dtype.kind not in "iu" or int(ids.min()) < 0:
        raise TraceError(
            f"{path.name}: {name} is {ids.dtype} {list(ids.shape)}, not integers [sequence, position, layer, k]"
        )
    if lengths is None:
        lengths = np.full(len(ids), ids.shape[1])
    if lengths.shape != (len(ids),) or lengths.min() < 0 or lengths.max() > ids.shape[1] or not lengths.sum():
        raise TraceError(f"{path.name}: lengths do not fit {len(ids)} sequences of {ids.shape[1]} positions")
    live = np.arange(ids.shape[1]) < lengths[:, None]
    tokens, said = ids[live], metadata.get("layers") if isinstance(metadata, dict) else None
    numbers = said if isinstance(said, list) and len(said) == ids.shape[2] else range(ids.shape[2])
    layers = tuple(str(number) for number in numbers)
    return RoutingTrace(path.name, tokens, int(tokens.max()) + 1, layers, len(ids))


def trace_report(trace: RoutingTrace, machine: Machine) -> Report:
    """The whole page."""
    counts = _counts(trace)
    curve = lru_curve(trace.tokens, trace.experts)
    steps, layers, top_k = trace.tokens.shape
    slots = {coverage: max(top_k, round(coverage * trace.experts)) for coverage in COVERAGES}
    quarter = slots[0.25]
    return Report(
        title=f"Routing of {trace.name}",
        subtitle=f"{trace.sequences} sequences, decoded one after the other, a token a step",
        numbers=[
            ("tokens", f"{steps:,}".replace(",", " ")),
            ("MoE layers", str(layers)),
            ("experts of a layer", str(trace.experts)),
            ("experts of a token", str(top_k)),
            ("hits of LRU at 25 %", percent(curve.hit_ratio(quarter))),
            ("zero-miss steps at 25 %", percent(curve.zero_miss_ratio(quarter))),
        ],
        figures=[
            _coverage(counts, curve, top_k),
            _layers(trace, curve, quarter),
            _breakdown(trace, curve, slots, machine),
            _table(trace, curve, slots, machine),
            _heat(trace, counts),
        ],
    )


def _counts(trace: RoutingTrace) -> npt.NDArray[np.int64]:
    """Pairs of each expert: int64 [L, E]."""
    found = np.zeros((len(trace.layers), trace.experts), dtype=np.int64)
    for layer in range(len(trace.layers)):
        found[layer] = np.bincount(trace.tokens[:, layer].reshape(-1), minlength=trace.experts)
    return found


def _coverage(counts: npt.NDArray[np.int64], curve: LruCurve, top_k: int) -> Figure:
    sizes = sorted({max(1, round(curve.experts * part / 40)) for part in range(1, 41)})
    ranked = np.sort(counts, axis=1)[:, ::-1].cumsum(axis=1)
    x = [size / curve.experts for size in sizes]
    lru = [size for size in sizes if size >= top_k]
    lru_x = [size / curve.experts for size in lru]
    chart = line_chart(
        "Coverage",
        [
            Line("hits, LRU", lru_x, [curve.hit_ratio(size) for size in lru], 0),
            Line(
                "hits, the hottest experts fixed",
                x,
                [float(ranked[:, size - 1].sum() / counts.sum()) for size in sizes],
                2,
            ),
            Line("zero-miss steps, LRU", lru_x, [curve.zero_miss_ratio(size) for size in lru], 1),
        ],
        x_label="slots / experts",
        x_format=percent,
        y_format=percent,
        y_most=1.0,
    )
    caption = (
        "What a pool of that size serves. Fixed: the experts that this very trace uses most, which nobody can know "
        "beforehand. Decode speed follows the steps without a miss."
    )
    return Figure("Coverage", caption, chart)


def _layers(trace: RoutingTrace, curve: LruCurve, slots: int) -> Figure:
    missed = curve.misses_per_step(slots)
    chart = bar_chart("Misses by layer", trace.layers, {"rows a step": missed.tolist()}, x_label="layer")
    return Figure(
        "Misses by layer",
        f"Rows that a step has to fetch with {slots} of {trace.experts} slots in each layer, under LRU.",
        chart,
    )


def _breakdown(trace: RoutingTrace, curve: LruCurve, slots: dict[float, int], machine: Machine) -> Figure:
    fetch = [_fetch_ms(curve, size, machine) for size in slots.values()]
    labels = [percent(coverage) for coverage in slots]
    parts = {"experts resident": [machine.resident * 1e3] * len(slots), "fetching rows": fetch}
    chart = bar_chart(
        "Time of a step",
        labels,
        parts,
        x_label="slots / experts",
        y_format=lambda value: f"{plain(value)} ms",
        kinds=(2, 3),
    )
    caption = (
        f"Predicted, not measured: {machine.resident * 1e3:.3g} ms with every expert there, and rows of "
        f"{format_bytes(machine.row_bytes)} over {machine.link / 1e9:.3g} GB/s, none of it hidden."
    )
    return Figure("Time of a step", caption, chart)


def _fetch_ms(curve: LruCurve, slots: int, machine: Machine) -> float:
    return float(curve.misses_per_step(slots).sum()) * machine.row_bytes / machine.link * 1e3


def _heat(trace: RoutingTrace, counts: npt.NDArray[np.int64]) -> Figure:
    share = counts / counts.sum(axis=1, keepdims=True) * trace.experts
    most = float(np.quantile(share, 0.99)) or 1.0
    chart = heat_map(
        "Heat",
        trace.layers,
        share.tolist(),
        x_label="expert",
        x_ends=("0", str(trace.experts - 1)),
        most=most,
        scale=lambda value: f"{value:.2g} ×",
    )
    return Figure(
        "Heat map",
        "A row is a layer, a cell an expert: how often it is used, in multiples of an equal share.",
        chart,
        wide=True,
    )


def _table(trace: RoutingTrace, curve: LruCurve, slots: dict[float, int], machine: Machine) -> Figure:
    rows = [
        [
            f"{percent(coverage)}, {size} of {trace.experts}",
            percent(curve.hit_ratio(size)),
            percent(curve.zero_miss_ratio(size)),
            f"{curve.misses_per_step(size).sum():.2f}",
            f"{machine.resident * 1e3 + _fetch_ms(curve, size, machine):.2f} ms",
        ]
        for coverage, size in slots.items()
    ]
    body = table(["slots", "hits", "zero-miss steps", "rows a step", "a step"], rows)
    return Figure(
        "In numbers", "LRU, single stream, cold start included; the last column is predicted.", body
    )
