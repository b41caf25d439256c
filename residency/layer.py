"""One MoE layer of one pass: resolve slots, run the experts, combine.

Every pair's contribution is stored and the contributions of a token are summed in the order of its choices at the
very end. Which experts were resident, and in what order the others arrived, therefore cannot change a bit. The price
is memory for tokens x top_k x hidden float32 numbers while a layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.groups import ExpertGroups, group_pairs
from ziggurat.residency.passes import PassMode, PassState, Route
from ziggurat.residency.ports import ExpertOps, RowCodec
from ziggurat.residency.runtime_errors import RoutingError
from ziggurat.residency.slots import SlotPool


class LayerRunner:
    """Computes layers against a slot pool. Holds no state of its own between calls."""

    def __init__(
        self, geometry: ServiceGeometry, codec: RowCodec, ops: ExpertOps, slots: SlotPool, fetcher: Fetcher
    ) -> None:
        self._geometry = geometry
        self._expert = ExpertGeometry(geometry.hidden, geometry.intermediate)
        self._codec = codec
        self._ops = ops
        self._slots = slots
        self._fetcher = fetcher

    def run(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H] in x's dtype. Rows of padding come out as zeros.

        RoutingError for shapes or ids that the model cannot have produced.
        """
        self._check(state, layer, x, topk_weights, topk_ids)
        live = state.step.tokens.count
        ids = topk_ids[:live].cpu().numpy()  # the layer's one host synchronisation
        groups = group_pairs(ids, self._geometry.experts, state.step.tokens.prefill)
        keys = groups.experts + layer * self._geometry.experts
        resident = self._slots.resident(layer, groups.experts)
        self._account(state, layer, groups, keys, resident)

        partials = torch.zeros((live, self._geometry.top_k, self._geometry.hidden), dtype=torch.float32)
        work = _Work(state, x[:live], partials, groups, keys)
        self._compute(work, np.flatnonzero(resident))
        absent = np.flatnonzero(~resident)
        if state.mode is PassMode.INLINE:
            self._fetch_and_compute(work, absent)
        else:
            weights = groups.weights[absent].tolist()
            state.missed.update(zip(keys[absent].tolist(), map(float, weights), strict=True))
        out = x.new_zeros(x.shape)
        out[:live] = self._ops.combine(partials, topk_weights[:live], x.dtype)
        return out

    def _check(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> None:
        g = self._geometry
        if not 0 <= layer < g.layers:
            raise RoutingError(f"layer index {layer} does not exist; there are {g.layers} MoE layers")
        if x.dim() != 2 or x.shape[1] != g.hidden:
            raise RoutingError(f"x has shape {tuple(x.shape)}, expected [tokens, {g.hidden}]")
        wanted = (x.shape[0], g.top_k)
        if tuple(topk_ids.shape) != wanted or tuple(topk_weights.shape) != wanted:
            raise RoutingError(
                f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be {wanted}"
            )
        if x.shape[0] < state.step.tokens.count:
            raise RoutingError(
                f"layer {layer} got {x.shape[0]} tokens in a step of {state.step.tokens.count} live tokens"
            )

    def _account(
        self,
        state: PassState,
        layer: int,
        groups: ExpertGroups,
        keys: np.typing.NDArray[np.int64],
        resident: np.typing.NDArray[np.bool_],
    ) -> None:
        """Counts pairs and remembers what this pass computes with.

        An inline pass tells the policy of uses at once. The routing of a replay pass may be wrong, so the policy
        hears of it only if the step returns its result.
        """
        step = state.step
        counts = groups.counts
        routed, missing = int(counts.sum()), int(counts[~resident].sum())
        if state.first:
            step.routed_pairs += routed
            step.missed_pairs += missing
        else:
            step.replay_routed_pairs += routed
            step.replay_missed_pairs += missing
        if state.mode is PassMode.REPLAY:
            state.missing_pairs += missing
        state.routes.append(Route(layer, groups.experts, counts))
        here = dict(zip(keys[resident].tolist(), map(float, groups.weights[resident].tolist()), strict=True))
        state.used.update(here)
        if state.mode is PassMode.INLINE:
            self._slots.touch(here)

    def _compute(self, work: _Work, chosen: np.typing.NDArray[np.intp]) -> None:
        """Run the experts of the chosen groups, all of which are resident, and store their pairs' contributions."""
        top_k = self._geometry.top_k
        flat = work.partials.view(-1, self._geometry.hidden)
        for group in chosen.tolist():
            expert = self._codec.decode(self._slots.row(int(work.keys[group])), self._expert)
            pairs = work.groups.of(group)
            x = work.x[torch.from_numpy(pairs // top_k)]
            flat[torch.from_numpy(pairs)] = self._ops.expert_ffn(x, expert, clamp=self._geometry.clamp)

    def _fetch_and_compute(self, work: _Work, absent: np.typing.NDArray[np.intp]) -> None:
        """Make the absent groups resident in as many rounds as the pool needs, and compute each round.

        A round may evict anything: the rows of earlier rounds have been computed with. Rows that only a scan wants
        come last and take at most the colder half of a full pool, so that a prompt does not wipe the decode set.
        """
        wanted = absent[work.groups.weights[absent] > 0]
        scanned = absent[work.groups.weights[absent] == 0]
        for chunk in _chunks(wanted, self._slots.slots):
            self._round(work, chunk)
        for chunk in _chunks(scanned, max(1, self._slots.free, self._slots.slots // 2)):
            self._round(work, chunk)

    def _round(self, work: _Work, chunk: np.typing.NDArray[np.intp]) -> None:
        state = work.state
        keys = work.keys[chunk].tolist()
        weights = map(float, work.groups.weights[chunk].tolist())
        outcome = self._fetcher.fetch(
            dict(zip(keys, weights, strict=True)), blocked=(), epoch=state.step.epoch
        )
        failed = {fault.key: fault.reason for fault in outcome.faults}
        arrived = np.array([key not in failed for key in keys], dtype=np.bool_)
        for group in chunk[~arrived].tolist():
            key = int(work.keys[group])
            state.fail(key, failed[key], work.groups.of(group) // self._geometry.top_k)
        self._compute(work, chunk[arrived])


class _Work:
    """One layer's inputs and the pair contributions being filled in."""

    __slots__ = ("groups", "keys", "partials", "state", "x")

    def __init__(
        self,
        state: PassState,
        x: torch.Tensor,
        partials: torch.Tensor,
        groups: ExpertGroups,
        keys: np.typing.NDArray[np.int64],
    ) -> None:
        self.state = state
        self.x = x
        self.partials = partials
        self.groups = groups
        self.keys = keys


def _chunks(groups: np.typing.NDArray[np.intp], size: int) -> Sequence[np.typing.NDArray[np.intp]]:
    return [groups[start : start + size] for start in range(0, len(groups), size)]
