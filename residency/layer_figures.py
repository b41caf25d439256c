"""What layers say of themselves in the metrics: how warm they are and how much of them is in the pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ziggurat.residency.metric_specs import HOTTEST, HOTTEST_TENTH
from ziggurat.residency.metrics import MetricWriter


def set_heat(
    writer: MetricWriter, heat: npt.NDArray[np.float64], here: npt.NDArray[np.bool_], slots: int
) -> None:
    """Set the gauges about heat, float64 [layers, experts]. here: bool [layers, experts], what the pool holds."""
    of_layer, in_pool = heat.sum(axis=1), np.where(here, heat, 0.0).sum(axis=1)
    total = float(of_layer.sum())
    writer.set("ziggurat_pool_heat_ratio", _share(float(in_pool.sum()), total))
    wanted = [min(slots, heat.size), *(_rows(part, heat.size) for _, part in HOTTEST)]
    best, *shares = (_share(most, total) for most in _hottest(heat, wanted))
    writer.set("ziggurat_pool_heat_best_ratio", best)
    for (name, _), share in zip(HOTTEST, shares, strict=True):
        writer.set("ziggurat_heat_ratio", share, name)
    safe = np.where(of_layer > 0.0, of_layer, 1.0)
    writer.set_layers("ziggurat_layer_pool_heat_ratio", in_pool / safe)
    ranked = np.sort(heat, axis=1)
    hottest = ranked[:, -_rows(HOTTEST_TENTH, heat.shape[1]) :].sum(axis=1)
    writer.set_layers("ziggurat_layer_hottest_tenth_ratio", hottest / safe)


def _hottest(heat: npt.NDArray[np.float64], wanted: list[int]) -> list[float]:
    """Heat of the hottest rows, as many as each of `wanted` says."""
    # Partitioning is a third of the work of sorting, and this runs between two steps.
    first = sorted({heat.size - rows for rows in wanted if rows})
    parted = np.partition(heat, first, axis=None) if first else heat.reshape(-1)
    return [float(parted[heat.size - rows :].sum()) if rows else 0.0 for rows in wanted]


def _share(part: float, total: float) -> float:
    return min(1.0, part / total) if total > 0.0 else 0.0


def _rows(part: float, rows: int) -> int:
    """The hottest `part` of so many rows: whole rows, and at least one."""
    return max(1, round(part * rows))
