"""MoE layers of a service whose pool is on a device: what is queued there for a layer, and what a pass has counted.

In a replay pass the host decides nothing: the kernels look experts up in the device's slot table, leave out those
without a slot, and count. Such a pass can be a replayed graph, in which this code does not even run. In an inline pass
the host reads each layer's routing, brings the missing rows, and queues the layer in as many portions as that takes.

A slot may be written again as soon as `pool.write` is called, although kernels that read it may still be queued: the
pool's copies wait for the stream that those kernels are on. Between the passes of a replayed step no kernel is even
queued, since the host has waited for the pass's tally, which comes after the pass's last kernel.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.device_state import Counted, DeviceState
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import IntArray, PassMode, PassState, Route, StepState
from ziggurat.residency.ports import LayerKernels
from ziggurat.residency.rounds import Indices, rounds
from ziggurat.residency.routing import check_shapes, count_pairs
from ziggurat.residency.runtime_errors import RoutingError, StepError
from ziggurat.residency.slots import ABSENT, SlotPool
from ziggurat.residency.transfers import Download


@dataclass(slots=True)
class _Deferred:
    """A step whose counts are on their way to the host."""

    step: StepState
    counts: Download


class DeviceLayers:
    """Runs layers through `kernels` against a slot pool, and keeps the books of a pass from what they count."""

    def __init__(
        self,
        geometry: ServiceGeometry,
        kernels: LayerKernels,
        slots: SlotPool,
        fetcher: Fetcher,
        state: DeviceState,
    ) -> None:
        self.defers = True
        self._geometry = geometry
        self._kernels = kernels
        self._slots = slots
        self._fetcher = fetcher
        self._device = state
        self._deferred: deque[_Deferred] = deque()
        self._spare: list[Download] = []

    # -- layers ------------------------------------------------------------------------------------------------

    def unarmed(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The launches of a replay pass with no live token: what graphs are captured from. Zeros [T, H]."""
        self._check(layer, x, topk_weights, topk_ids, 0)
        return self._launch(layer, x, topk_weights, topk_ids)

    def run(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H] in x's dtype. Rows of padding come out as zeros.

        RoutingError for shapes, or in an inline pass ids, that the model cannot have produced.
        """
        self._check(layer, x, topk_weights, topk_ids, state.step.tokens.count)
        if state.mode is PassMode.REPLAY:
            return self._launch(layer, x, topk_weights, topk_ids)
        return self._serve(state, layer, x, topk_weights, topk_ids)

    def _launch(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        device = self._device
        return self._kernels.run(
            x,
            topk_weights,
            topk_ids,
            slots=device.table_of[layer],
            pool=self._slots.pool.tensor,
            live=device.live,
            prefill=device.prefill,
            counts=device.counts_of[layer],
            tally=device.tally,
        )

    def _serve(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """A layer of an inline pass: what is resident first, then the rest as it arrives."""
        tokens = state.step.tokens
        live = self._device.live
        self._kernels.begin(x, topk_ids, live)
        ids = topk_ids[: tokens.count].cpu().numpy()  # the layer's one host synchronisation
        pairs, steady = count_pairs(ids, self._geometry.experts, tokens.prefill)
        experts = np.flatnonzero(pairs)
        resident = self._slots.resident(layer, experts)
        self._account(state, layer, experts, pairs[experts], steady[experts], resident)
        self._add(layer, experts[resident], x, topk_ids)
        for chosen in rounds(self._slots, experts[~resident], steady):
            self._round(state, layer, chosen, steady, ids, x, topk_ids)
        return self._kernels.finish(x, topk_weights, topk_ids, live)

    def _round(
        self,
        state: PassState,
        layer: int,
        chosen: Indices,
        steady: IntArray,
        ids: npt.NDArray[np.integer],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> None:
        base = layer * self._geometry.experts
        wanted = {base + expert: float(steady[expert]) for expert in chosen.tolist()}
        outcome = self._fetcher.fetch(wanted, blocked=(), epoch=state.step.epoch)
        failed = {fault.key: fault.reason for fault in outcome.faults}
        for key, reason in failed.items():
            state.fail(key, reason, np.flatnonzero((ids == key - base).any(axis=1)))
        self._add(
            layer,
            np.array([expert for expert in chosen.tolist() if base + expert not in failed], dtype=np.intp),
            x,
            topk_ids,
        )

    def _add(self, layer: int, experts: Indices, x: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """Queue the contributions of `experts`, all of which are resident."""
        if not len(experts):
            return
        chunk = np.full(self._geometry.experts, ABSENT, dtype=np.int32)
        chunk[experts] = self._slots.table.numpy[layer, experts]
        self._kernels.add(
            x,
            topk_ids,
            self._device.live,
            slots=self._device.show_chunk(chunk),
            pool=self._slots.pool.tensor,
        )

    def _check(
        self,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        live: int,
    ) -> None:
        check_shapes(self._geometry, layer, x, topk_weights, topk_ids, live)
        if x.shape[0] > self._device.max_tokens:
            raise RoutingError(
                f"layer {layer} got {x.shape[0]} tokens, but the largest batch was said to have "
                f"{self._device.max_tokens}"
            )

    # -- passes ------------------------------------------------------------------------------------------------

    def begin(self, state: PassState) -> None:
        """Before the forward pass."""
        tokens = state.step.tokens
        self._device.arm(tokens.count, tokens.prefill)
        if state.mode is PassMode.REPLAY:
            self._device.show(self._slots.table)

    def end(self) -> None:
        """After the forward pass, whether it worked or raised."""
        self._device.disarm()

    def learn(self, state: PassState) -> None:
        """After a replay pass: wait for it, and put what it counted into its state. RoutingError for bad ids."""
        counted = self._device.counted()
        # The pass came behind the rows that were fetched for it, so these have arrived, too.
        self._fetcher.arrived()
        self._check_ids(counted)
        pairs, steady = counted.pairs, counted.steady
        here = self._slots.table.numpy != ABSENT
        routed = pairs > 0
        state.used.update(_weights(steady, routed & here))
        state.missed.update(_weights(steady, routed & ~here))
        state.missing_pairs = counted.missing
        state.routes.append(_route(pairs))
        state.count(int(pairs.sum()), counted.missing)

    def defer(self, step: StepState) -> None:
        """After a pass that cannot have missed: have its counts brought, and do not wait for them."""
        counts = self._spare.pop() if self._spare else self._device.download()
        counts.take()
        self._deferred.append(_Deferred(step, counts))

    def collect(self, *, wait: bool) -> list[StepState]:
        """The deferred steps whose counts have arrived (with `wait` all of them), oldest first, now with counts."""
        done = []
        while self._deferred and (wait or self._deferred[0].counts.arrived()):
            one = self._deferred.popleft()
            counted = self._device.parse(one.counts.read())
            self._spare.append(one.counts)
            self._check_ids(counted)
            if counted.missing:
                raise StepError(f"{counted.missing} pairs missed in a pool that holds every row")
            one.step.routed_pairs += int(counted.pairs.sum())
            one.step.routes = [_route(counted.pairs)]
            done.append(one.step)
        return done

    def _check_ids(self, counted: Counted) -> None:
        if counted.invalid:
            raise RoutingError(
                f"{counted.invalid} pairs are routed to experts that do not exist; experts are "
                f"0..{self._geometry.experts - 1}"
            )

    def _account(
        self,
        state: PassState,
        layer: int,
        experts: Indices,
        pairs: IntArray,
        steady: IntArray,
        resident: npt.NDArray[np.bool_],
    ) -> None:
        """Counts of a layer of an inline pass; the policy hears of uses at once."""
        keys = experts[resident] + layer * self._geometry.experts
        here = dict(zip(keys.tolist(), map(float, steady[resident].tolist()), strict=True))
        state.used.update(here)
        self._slots.touch(here)
        state.routes.append(Route(layer, experts, pairs))
        state.count(int(pairs.sum()), int(pairs[~resident].sum()))


def _weights(steady: IntArray, chosen: npt.NDArray[np.bool_]) -> dict[int, float]:
    """Row key -> pairs of tokens that are not prefill, of the chosen experts, bool [L, E]."""
    keys = np.flatnonzero(chosen)
    return dict(zip(keys.tolist(), map(float, steady.reshape(-1)[keys].tolist()), strict=True))


def _route(pairs: IntArray) -> Route:
    layers, experts = np.nonzero(pairs)
    return Route(layers, experts, pairs[layers, experts])
