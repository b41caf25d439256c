"""What an LRU pool of every size would have done on a trace, in one pass over it.

A layer's routed set in a step is one event: its experts are looked up together, and none of them leaves during it. Then
the pool of a layer with s slots holds the s experts that were used last, whatever s is, so an expert is found if fewer
than s others were used since (Mattson's stack distance). Layers have slots of their own, as many each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class LruCurve:
    """ranks: int64 [steps, L, k], how many other experts of the layer were used since a routed one was; E for one that
    was never used before. Hits with s slots are ranks below s."""

    ranks: npt.NDArray[np.int64]
    experts: int

    def hit_ratio(self, slots: int) -> float:
        """Routed pairs that were found."""
        return float((self.ranks < slots).mean())

    def zero_miss_ratio(self, slots: int) -> float:
        """Steps that found all of theirs."""
        return float((self.ranks < slots).all(axis=(1, 2)).mean())

    def misses_per_step(self, slots: int) -> npt.NDArray[np.float64]:
        """Rows that a step has to fetch, by layer: float64 [L]."""
        missed: npt.NDArray[np.float64] = (self.ranks >= slots).sum(axis=2).mean(axis=0)
        return missed


def lru_curve(tokens: IdArray, experts: int) -> LruCurve:
    """tokens: [steps, L, k], a token's distinct experts in every layer, in order. A step is one token."""
    steps, layers, _ = tokens.shape
    last = np.full((layers, experts), -1, dtype=np.int64)
    ranks = np.empty(tokens.shape, dtype=np.int64)
    here = np.arange(layers)[:, None]
    for step in range(steps):
        ids = tokens[step]
        used = last[here, ids]
        # Among experts of one event the later choice is the more recent one; times are distinct for that.
        found = (last[:, None, :] > used[:, :, None]).sum(axis=2)
        ranks[step] = np.where(used < 0, experts, found)
        last[here, ids] = step * tokens.shape[2] + np.arange(tokens.shape[2])
    return LruCurve(ranks, experts)
