"""Routing of a layer, regrouped by expert. One sort for the whole batch, no Python work per token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ziggurat.residency.passes import BoolArray, IntArray
from ziggurat.residency.routing import check_ids


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The pairs (token t, choice j) of a layer; pair number = t * k + j.

    experts: int64 [G], ascending. pairs: int64 [P], pair numbers grouped by expert, ascending within a group.
    bounds: int64 [G + 1]; group g is pairs[bounds[g]:bounds[g + 1]].
    weights: int64 [G], how many of a group's pairs belong to tokens that are not prefill (0 = scan only).
    """

    experts: IntArray
    pairs: IntArray
    bounds: IntArray
    weights: IntArray

    @property
    def counts(self) -> IntArray:
        """int64 [G], pairs per group."""
        return np.diff(self.bounds)

    def of(self, group: int) -> IntArray:
        """Pair numbers of one group."""
        return self.pairs[self.bounds[group] : self.bounds[group + 1]]


def group_pairs(ids: npt.NDArray[np.integer], experts: int, prefill: BoolArray | None = None) -> ExpertGroups:
    """Group ids [T, k] by expert. RoutingError if an id is outside 0..experts-1.

    prefill: bool [T]. A token that names one expert twice contributes two pairs to that expert's group.
    """
    flat = ids.reshape(-1)
    if flat.size == 0:
        empty = np.zeros(0, dtype=np.int64)
        return ExpertGroups(empty, empty, np.zeros(1, dtype=np.int64), empty)
    check_ids(ids, experts)
    counts = np.bincount(flat, minlength=experts)
    chosen = np.flatnonzero(counts)
    bounds = np.zeros(chosen.size + 1, dtype=np.int64)
    np.cumsum(counts[chosen], out=bounds[1:])
    steady = counts if prefill is None else np.bincount(ids[~prefill].reshape(-1), minlength=experts)
    return ExpertGroups(chosen, np.argsort(flat, kind="stable"), bounds, steady[chosen])
