"""Layers whose absent experts pass through a few slots of their own, one portion after the other."""

from __future__ import annotations

import numpy as np
import torch

from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.passes import BoolArray, IntArray, PassState, Route, StepTokens
from ziggurat.residency.policies.lru import LruPolicy
from ziggurat.residency.ports import LayerKernels, RowPool
from ziggurat.residency.rounds import Indices, rounds
from ziggurat.residency.routing import check_shapes, count_pairs
from ziggurat.residency.slots import ABSENT, IntArray32, SlotPool, SlotTable


class StagedLayers:
    """StreamedLayers over a small pool `staging` on the device of `pool` (uint8 [S, stride], never written here)."""

    def __init__(
        self,
        geometry: ServiceGeometry,
        kernels: LayerKernels,
        pool: torch.Tensor,
        staging: RowPool,
        cache: HostCache,
        state: DeviceState,
    ) -> None:
        self._geometry = geometry
        self._kernels = kernels
        self._pool = pool
        table = SlotTable(geometry.layers, geometry.experts, staging.slots, "")
        self._staging = SlotPool(staging, table, LruPolicy())
        self._fetcher = Fetcher(self._staging, cache)
        self._device = state
        self._table: IntArray32 = np.empty((0, 0), dtype=np.int32)
        self._epoch = 0

    def begin(self, table: IntArray32, tokens: StepTokens, epoch: int) -> None:
        self._table, self._epoch = table, epoch

    def end(self) -> None:
        self._fetcher.drain()

    def close(self) -> None:
        """Give the memory back."""
        self._staging.pool.close()

    def run(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        tokens = state.step.tokens
        check_shapes(self._geometry, layer, x, topk_weights, topk_ids, tokens.count)
        ids = topk_ids[: tokens.count].cpu().numpy()  # the layer's one host synchronisation
        outs = []
        for first, rows, live in self._device.parts(x.shape[0], tokens.count, self._kernels.part_tokens):
            here = slice(first, first + rows)
            prefill = None if tokens.prefill is None else tokens.prefill[here]
            part = _Part(x[here], topk_ids[here], live, ids[here], first)
            self._kernels.begin(part.x, part.topk_ids, live)
            self._part(state, layer, part, prefill)
            outs.append(self._kernels.finish(part.x, topk_weights[here], part.topk_ids, live))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _part(self, state: PassState, layer: int, part: _Part, prefill: BoolArray | None) -> None:
        pairs, steady = count_pairs(part.ids, self._geometry.experts, prefill)
        experts = np.flatnonzero(pairs)
        here = self._table[layer, experts] != ABSENT
        state.routes.append(Route(layer, experts, pairs[experts]))
        state.count(int(pairs.sum()), int(pairs[experts[~here]].sum()))
        self._add(part, experts[here], self._table[layer], self._pool)
        for chosen in rounds(self._staging, experts[~here], steady):
            self._round(state, layer, chosen, steady, part)

    def _round(self, state: PassState, layer: int, chosen: Indices, steady: IntArray, part: _Part) -> None:
        base = layer * self._geometry.experts
        table = self._staging.table.numpy
        absent = [expert for expert in chosen.tolist() if table[layer, expert] == ABSENT]
        wanted = {base + expert: float(steady[expert]) for expert in absent}
        kept = {base + expert for expert in chosen.tolist()}
        outcome = self._fetcher.fetch(wanted, blocked=kept, epoch=self._epoch)
        failed = {fault.key: fault.reason for fault in outcome.faults}
        for key, reason in failed.items():
            state.fail(key, reason, part.first + np.flatnonzero((part.ids == key - base).any(axis=1)))
        arrived = [expert for expert in chosen.tolist() if base + expert not in failed]
        self._add(part, np.array(arrived, dtype=np.intp), table[layer], self._staging.pool.tensor)

    def _add(self, part: _Part, experts: Indices, slots: IntArray32, pool: torch.Tensor) -> None:
        """Queue the contributions of `experts`, which are in the slots [E] of `pool`."""
        if len(experts):
            chunk = np.full(self._geometry.experts, ABSENT, dtype=np.int32)
            chunk[experts] = slots[experts]
            self._kernels.add(
                part.x, part.topk_ids, part.live, slots=self._device.show_chunk(chunk), pool=pool
            )


class _Part:
    """Rows of a batch from `first` on: x [n, H], topk_ids [n, k] and live [1] on the device, ids of the live rows."""

    __slots__ = ("first", "ids", "live", "topk_ids", "x")

    def __init__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor,
        ids: np.typing.NDArray[np.integer],
        first: int,
    ) -> None:
        self.x, self.topk_ids, self.live, self.ids, self.first = x, topk_ids, live, ids, first
