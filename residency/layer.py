"""One MoE layer of one pass: resolve slots, run the experts, combine.

Every pair's contribution is stored and the contributions of a token are summed in the order of its choices at the
very end. Which experts were resident, and in what order the others arrived, therefore cannot change a bit. The price
is memory for tokens x top_k x hidden float32 numbers while a layer runs.
"""

from __future__ import annotations

import numpy as np
import torch

from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.groups import ExpertGroups, group_pairs
from ziggurat.residency.late_passes import LatePasses
from ziggurat.residency.passes import PassMode, PassState, Route, StepTokens
from ziggurat.residency.ports import ExpertOps, RowCodec
from ziggurat.residency.rounds import rounds
from ziggurat.residency.routing import check_shapes
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.slots import SlotPool


class LayerRunner:
    """Computes layers against a slot pool in host memory. Holds no state of its own between calls.

    Layers tell a pass what they did while they run, so there is nothing to do around a pass.
    """

    def __init__(
        self, geometry: ServiceGeometry, codec: RowCodec, ops: ExpertOps, slots: SlotPool, fetcher: Fetcher
    ) -> None:
        self.defers = False
        self.late: LatePasses | None = None
        self._geometry = geometry
        self._expert = ExpertGeometry(geometry.hidden, geometry.intermediate)
        self._codec = codec
        self._ops = ops
        self._slots = slots
        self._fetcher = fetcher

    def begin(self, state: PassState) -> None:
        return

    def end(self) -> None:
        return

    def learn(self, state: PassState) -> None:
        return

    def begin_sure(self, tokens: StepTokens) -> None:
        raise StepError("the layers of a pool in host memory have nothing to defer")

    def defer(self) -> None:
        raise StepError("the layers of a pool in host memory have nothing to defer")

    def collect(self, *, wait: bool) -> None:
        return

    def unarmed(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Zeros [T, H] in x's dtype."""
        return x.new_zeros(x.shape)

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
        live = state.step.tokens.count
        check_shapes(self._geometry, layer, x, topk_weights, topk_ids, live)
        ids = topk_ids[:live].cpu().numpy()  # the layer's one host synchronisation
        groups = group_pairs(ids, self._geometry.experts, state.step.tokens.prefill)
        keys = groups.experts + layer * self._geometry.experts
        resident = self._slots.resident(layer, groups.experts)
        if state.mode is PassMode.INLINE:
            self._slots.routed(layer, ids, state.step.tokens.prefill)
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
        counts = groups.counts
        missing = int(counts[~resident].sum())
        state.count(int(counts.sum()), missing)
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
        """Make the absent groups resident in as many rounds as the pool needs, and compute each round."""
        for chunk in rounds(self._slots, absent, work.groups.weights):
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
