"""MoE layers of a service whose pool is on a device: what is queued there for a layer, and what a pass has counted.

In a replay pass the host decides nothing: the kernels look experts up in the device's slot table, leave out those
without a slot, and count. Such a pass can be a replayed graph, in which this code does not even run. In an inline pass
the host reads each layer's routing, brings the missing rows, and queues the layer in as many portions as that takes.
With staging memory, rows that only a prompt wants do not take slots from others: they pass through that memory, and a
pass of many tokens does not even wait for its routing (see `ziggurat.residency.streaming.layers`).

A slot may be written again as soon as `pool.write` is called, although kernels that read it may still be queued: the
pool's copies wait for the stream that those kernels are on. Between the passes of a replayed step no kernel is even
queued, since the host has waited for the pass's tally, which comes after the pass's last kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.direct_layers import DirectLayers
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.late_passes import LateCounts, LatePasses
from ziggurat.residency.passes import BoolArray, IntArray, PassMode, PassState, Route, StepTokens
from ziggurat.residency.ports import LayerKernels
from ziggurat.residency.rounds import Indices, rounds
from ziggurat.residency.routing import check_counted, check_shapes, count_pairs
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.slots import ABSENT, SlotPool
from ziggurat.residency.streaming.layers import StreamedLayers, TokenPart


class DeviceLayers:
    """Runs layers through `kernels` against a slot pool, and keeps the books of a pass from what they count.

    streamed: how prompts pass by a full pool; None = rows that a prompt wants take slots. direct: layers that have no
    slots and are read in place.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        kernels: LayerKernels,
        slots: SlotPool,
        fetcher: Fetcher,
        state: DeviceState,
        streamed: StreamedLayers | None = None,
        direct: DirectLayers | None = None,
    ) -> None:
        self.defers = True
        self._geometry = geometry
        self._kernels = kernels
        self._slots = slots
        self._fetcher = fetcher
        self._device = state
        self._streamed = streamed
        self._direct = direct
        self._passing: PassState | None = None  # of a pass that is streamed as a whole
        self._sure = False  # whether the passes since the last `begin` could not miss
        self.late = LatePasses(state.download, state.take)

    # -- layers ------------------------------------------------------------------------------------------------

    def unarmed(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The launches of a replay pass with no live token: what graphs are captured from. Zeros [T, H]."""
        check_shapes(self._geometry, layer, x, topk_weights, topk_ids, 0, most=self._device.max_tokens)
        if not _capturing(x.device):
            self._device.disarm()
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
        check_shapes(
            self._geometry,
            layer,
            x,
            topk_weights,
            topk_ids,
            state.step.tokens.count,
            most=self._device.max_tokens,
        )
        if state.mode is PassMode.REPLAY:
            return self._launch(layer, x, topk_weights, topk_ids)
        if self._passing is not None and self._streamed is not None:
            return self._streamed.run(state, layer, x, topk_weights, topk_ids)
        return self._serve(state, layer, x, topk_weights, topk_ids)

    def _launch(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        device = self._device
        slots, pool = device.table_of[layer], self._slots.pool.tensor
        places = None if self._direct is None else self._direct.slots_of(layer)
        if places is not None and self._direct is not None:
            slots, pool = places, self._direct.arena
        return self._kernels.run(
            x,
            topk_weights,
            topk_ids,
            slots=slots,
            pool=pool,
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
        """A layer of an inline pass, in as many parts as its tokens need."""
        tokens = state.step.tokens
        ids = topk_ids[: tokens.count].cpu().numpy()  # the layer's one host synchronisation
        if self._direct is not None and self._direct.slots_of(layer) is not None:
            pairs, _ = count_pairs(ids, self._geometry.experts, None)
            state.routes.append(Route(layer, np.flatnonzero(pairs), pairs[pairs > 0]))
            state.count(int(pairs.sum()), 0)
            return self._launch(layer, x, topk_weights, topk_ids)
        outs = []
        for first, rows, live in self._device.parts(x.shape[0], tokens.count, self._kernels.part_tokens):
            here = slice(first, first + rows)
            part = TokenPart(x[here], topk_ids[here], live, first)
            prefill = None if tokens.prefill is None else tokens.prefill[here]
            self._experts(state, layer, part, ids[here], prefill)
            outs.append(self._kernels.finish(part.x, topk_weights[here], part.ids, live))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _experts(
        self,
        state: PassState,
        layer: int,
        part: TokenPart,
        ids: npt.NDArray[np.integer],
        prefill: BoolArray | None,
    ) -> None:
        """Contributions of what is resident first, then of the rest as it arrives. ids: of the part's live tokens."""
        self._kernels.begin(part.x, part.ids, part.live)
        pairs, steady = count_pairs(ids, self._geometry.experts, prefill)
        experts = np.flatnonzero(pairs)
        resident = self._slots.resident(layer, experts)
        self._slots.routed(layer, ids, prefill)
        self._account(state, layer, experts, pairs[experts], steady[experts], resident)
        self._add(layer, experts[resident], part)

        def failed(key: int, reason: str) -> None:
            hit = (ids == key - layer * self._geometry.experts).any(axis=1)
            state.fail(key, reason, part.first + np.flatnonzero(hit))

        absent = experts[~resident]
        passing = absent[:0]
        if self._streamed is not None:
            scanned = absent[steady[absent] == 0]
            absent = absent[steady[absent] > 0]
            room = max(0, self._slots.free - len(absent))  # a scan may have what nobody else needs
            absent, passing = np.concatenate([absent, scanned[:room]]), scanned[room:]
        for chosen in rounds(self._slots, absent, steady):
            self._round(state, layer, chosen, steady, part, failed)
        if self._streamed is not None and len(passing):
            self._streamed.add(layer, passing, part, failed)

    def _round(
        self,
        state: PassState,
        layer: int,
        chosen: Indices,
        steady: IntArray,
        part: TokenPart,
        failed: Callable[[int, str], None],
    ) -> None:
        base = layer * self._geometry.experts
        wanted = {base + expert: float(steady[expert]) for expert in chosen.tolist()}
        outcome = self._fetcher.fetch(wanted, blocked=(), epoch=state.step.epoch)
        for fault in outcome.faults:
            failed(fault.key, fault.reason)
        lost = {fault.key for fault in outcome.faults}
        arrived = [expert for expert in chosen.tolist() if base + expert not in lost]
        self._add(layer, np.array(arrived, dtype=np.intp), part)

    def _add(self, layer: int, experts: Indices, part: TokenPart) -> None:
        """Queue the contributions of `experts`, all of which are resident."""
        if not len(experts):
            return
        chunk = np.full(self._geometry.experts, ABSENT, dtype=np.int32)
        chunk[experts] = self._slots.table.numpy[layer, experts]
        self._kernels.add(
            part.x,
            part.ids,
            part.live,
            slots=self._device.show_chunk(chunk),
            pool=self._slots.pool.tensor,
        )

    # -- passes ------------------------------------------------------------------------------------------------

    def begin(self, state: PassState) -> None:
        """Before the forward pass."""
        tokens = state.step.tokens
        self._device.arm(tokens.count, tokens.prefill)
        self._sure = False
        if state.mode is PassMode.REPLAY:
            self._device.show(self._slots.table)
        elif self._streamed is not None:
            # Free slots are a prompt's to fill; after that it passes by. Many decoding tokens do not: what they use
            # should get slots.
            prompt = 0 if tokens.prefill is None else int(tokens.prefill.sum())
            slotless = self._direct is not None and bool(self._direct.mask.all())
            blind = self._streamed.blind(prompt) and (slotless or not self._slots.free)
            self._streamed.begin(self._slots.table.numpy, tokens, state.step.epoch, blind=blind)
            self._passing = state if blind else None

    def end(self) -> None:
        """After a forward pass that followed `begin`, or one that raised. RoutingError for bad ids."""
        state, self._passing = self._passing, None
        self.late.abandon()
        try:
            if state is not None and self._streamed is not None:
                self._streamed.end()
                self._slots.touch(state.used)
        finally:
            self._device.disarm()

    def learn(self, state: PassState) -> None:
        """After a replay pass: wait for it, and put what it counted into its state. RoutingError for bad ids."""
        counted = self._device.counted()
        # The pass came behind the rows that were fetched for it, so these have arrived, too.
        self._fetcher.arrived()
        check_counted(self._geometry, counted.invalid)
        pairs, steady = counted.pairs, counted.steady
        here = self._slots.table.numpy != ABSENT
        routed = pairs > 0
        state.used.update(_weights(steady, routed & here))
        absent = ~here if self._direct is None else ~(here | self._direct.mask)
        state.missed.update(_weights(steady, routed & absent))
        state.missing_pairs = counted.missing
        state.routes.append(_route(pairs))
        state.count(int(pairs.sum()), counted.missing)

    def begin_sure(self, tokens: StepTokens) -> None:
        """Instead of `begin`, before a pass that cannot miss. Of several such passes only the first one has to start
        from zero, and nobody asks whose tokens belong to a prompt."""
        if self._sure:
            self._device.arm_again(tokens.count, None)
        else:
            self._device.arm(tokens.count, None)
            self._sure = True
        # A pool that was emptied and filled anew holds its rows elsewhere.
        self._device.show(self._slots.table)
        self.late.begun()

    def defer(self) -> None:
        """Instead of `learn`, after a pass that cannot have missed: its counts come later, with those of others."""
        self.late.launched()

    def collect(self, *, wait: bool) -> LateCounts | None:
        """What has arrived of deferred passes, with `wait` all of it."""
        self.late.ask()
        copies = self.late.arrived(wait=wait)
        if not copies:
            return None
        counted = self._device.parse(copies[-1].counts.read())
        self.late.give_back(copies)
        check_counted(self._geometry, counted.invalid)
        if counted.missing:
            raise StepError(f"{counted.missing} pairs missed in a pool that holds every row")
        return LateCounts(sum(one.passes for one in copies), counted.pairs)

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


def _capturing(device: torch.device) -> bool:
    """Whether work on the current stream is captured and not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _weights(steady: IntArray, chosen: npt.NDArray[np.bool_]) -> dict[int, float]:
    """Row key -> pairs of tokens that are not prefill, of the chosen experts, bool [L, E]."""
    keys = np.flatnonzero(chosen)
    return dict(zip(keys.tolist(), map(float, steady.reshape(-1)[keys].tolist()), strict=True))


def _route(pairs: IntArray) -> Route:
    layers, experts = np.nonzero(pairs)
    return Route(layers, experts, pairs[layers, experts])
