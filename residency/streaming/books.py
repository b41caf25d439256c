"""What streamed layers tell a pass: whom its tokens were routed to, and which of them lack a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import IntArray, PassState, Route
from ziggurat.residency.routing import count_pairs
from ziggurat.residency.slots import ABSENT


@dataclass(frozen=True, slots=True)
class Lost:
    """A row that could not be read for the tokens `first` up to `end` of its layer."""

    key: int
    reason: str
    first: int
    end: int


class RoutingLog:
    """The ids that layers were called with, kept on the device until the pass is over."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._layers: list[int] = []
        self._ids: list[torch.Tensor] = []

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """ids int [live, k]; queued only. Numbers that are no expert stay such in 16 bits."""
        self._layers.append(layer)
        self._ids.append(ids.clamp(-1, self._experts).to(torch.int16))

    def take(self) -> list[tuple[int, npt.NDArray[np.int16]]]:
        """(layer, ids) of every call since the last `take`; waits for the device."""
        layers, ids = self._layers, self._ids
        self.clear()
        if not ids:
            return []
        values: npt.NDArray[np.int16] = torch.stack(ids).cpu().numpy()
        return list(zip(layers, values, strict=True))

    def clear(self) -> None:
        self._layers, self._ids = [], []


def account(
    geometry: ServiceGeometry,
    state: PassState,
    layer: int,
    ids: npt.NDArray[np.integer],
    table: npt.NDArray[np.int32],
    *,
    direct: bool,
) -> IntArray:
    """Book a layer's routing, ids [live, k], against its slots, int32 [E]; -> pairs of each expert, int64 [E].

    direct: the layer has no slots and misses none. RoutingError if an id is outside 0..E-1.
    """
    pairs, steady = count_pairs(ids, geometry.experts, state.step.tokens.prefill)
    experts = np.flatnonzero(pairs)
    resident = table[experts] != ABSENT
    here = experts[resident]
    keys = here + layer * geometry.experts
    state.used.update(zip(keys.tolist(), map(float, steady[here].tolist()), strict=True))
    state.routes.append(Route(layer, experts, pairs[experts]))
    state.count(int(pairs.sum()), 0 if direct else int(pairs[experts[~resident]].sum()))
    return pairs


def fail(
    geometry: ServiceGeometry, state: PassState, lost: list[Lost], layer: int, ids: npt.NDArray[np.integer]
) -> None:
    """Record which tokens lack a row of `layer`. A lost row that nobody was routed to failed nobody."""
    for one in lost:
        if one.key // geometry.experts != layer:
            continue
        tokens = one.first + np.flatnonzero(
            (ids[one.first : one.end] == one.key % geometry.experts).any(axis=1)
        )
        if len(tokens):
            state.fail(one.key, one.reason, tokens)
