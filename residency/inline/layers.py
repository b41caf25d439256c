"""MoE layers that make their own experts resident: what the host does around a pass in which it decides nothing.

The device owns slots, their owners and their heat. The host shows it where rows are in the arena, launches the pass,
and reads afterwards what happened: counts, and a log of what was admitted and evicted. If the arena holds every row
nothing can be missing, and nobody waits for that either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ziggurat.kernels.lookahead import NOTHING_GUESSED, Guess, Lookahead, LookaheadCounts
from ziggurat.residency.device_state import Counted
from ziggurat.residency.direct_layers import DirectLayers
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.state import Events, InlineState
from ziggurat.residency.late_passes import LateCounts, LatePasses
from ziggurat.residency.passes import IntArray, PassMode, PassState, Route, StepTokens
from ziggurat.residency.ports import LayerKernels
from ziggurat.residency.routing import check_counted, check_shapes
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.slots import ABSENT, SlotPool
from ziggurat.residency.streaming.layers import StreamedLayers

GuessOf = Callable[[int], Guess | None]
"""Who guesses which experts a layer (index) is routed to, from what goes into those of the layer before. Asked whenever
the layer before is launched or captured; None: nothing is fetched this time."""


@dataclass(slots=True)
class InlineCounts:
    """What passes did since the start. rows: copied into slots by the device; by_layer: the same, int64 [L].
    arena_misses: rows that it wanted and the arena did not have. ahead: what came of guesses, as the device counts."""

    by_layer: IntArray
    rows: int = 0
    arena_misses: int = 0
    ahead: LookaheadCounts = NOTHING_GUESSED

    @classmethod
    def of(cls, layers: int) -> InlineCounts:
        """Nothing yet."""
        return cls(np.zeros(layers, dtype=np.int64))


class InlineLayers:
    """Runs layers through `kernels` with an admission, and follows what it does from the log.

    Two kinds of passes: those of mode REPLAY leave everything to the device, with or without a captured graph; those
    of mode INLINE are `streamed`, and change no slot.

    want: called with the keys of rows that have left the pool and are not in the arena either. direct: layers that
    have no slots, and are read in place. lookahead: spares for rows that are fetched before they are asked for;
    `guess_of` says which, None: nobody guesses.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        kernels: LayerKernels,
        slots: SlotPool,
        cache: InlineCache,
        state: InlineState,
        streamed: StreamedLayers,
        want: Callable[[Iterable[int]], None],
        direct: DirectLayers | None = None,
        lookahead: Lookahead | None = None,
    ) -> None:
        self.defers = True
        self.lookahead = lookahead
        self.guess_of: GuessOf | None = None
        self.counts = InlineCounts.of(geometry.layers)
        self._geometry = geometry
        self._kernels = kernels
        self._slots = slots
        self._cache = cache
        self._device = state
        self._streamed = streamed
        self._want = want
        self._direct = direct
        self._captured = {
            True: 0,
            False: 0,
        }  # rows of the largest captured batch, by whether its layers admit
        self._streaming = False
        self._pass: int | None = (
            None  # epoch of the pass that was launched last, until it is learned or deferred
        )
        self._sure = False  # whether the passes since the last `begin` could not miss
        self._admits = True  # whether these may, because the pool does not hold every row
        self._events = 0  # that the last one of these may have added to the log
        self._logged = 0  # the same of all since a copy of the log was asked for
        slotless = 0 if direct is None else int(direct.mask.sum())
        self._rows = (geometry.layers - slotless) * geometry.experts  # that need a slot
        self.late = LatePasses(state.download, state.take)

    # -- layers ------------------------------------------------------------------------------------------------

    def unarmed(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The launches of a pass with no live token: what graphs are captured from. Zeros [T, H]."""
        check_shapes(self._geometry, layer, x, topk_weights, topk_ids, 0, most=self._device.max_tokens)
        capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._device.disarm()
        fits = x.shape[0] <= self._kernels.part_tokens
        if capturing:
            self._captured[fits] = max(self._captured[fits], x.shape[0])
        return self._launch(layer, x, topk_weights, topk_ids, admits=fits)

    @property
    def most_tokens(self) -> int:
        """Live tokens of the largest step that layers can admit for. A batch of more rows than the kernels take at once
        admits nothing, so if a graph of such a batch was captured, steps must not be padded to that."""
        return self._captured[True] if self._captured[False] else self._kernels.part_tokens

    def run(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H] in x's dtype. Rows of padding come out as zeros.

        RoutingError for shapes, or in a streamed pass ids, that the model cannot have produced.
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
        return self._streamed.run(state, layer, x, topk_weights, topk_ids)

    def _launch(
        self,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        admits: bool = True,
    ) -> torch.Tensor:
        device = self._device
        slots, pool = device.table_of[layer], self._slots.pool.tensor
        places = None if self._direct is None else self._direct.slots_of(layer)
        if places is not None and self._direct is not None:
            slots, pool, admits = places, self._direct.arena, False
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
            admission=device.admission if admits else None,
            layer=layer,
            lookahead=self.lookahead if admits else None,
            guess=self._guess(layer) if admits else None,
        )

    def _guess(self, layer: int) -> Guess | None:
        """What layer number `layer` has fetched for the next one, if that has slots and somebody guesses."""
        of, after = self.guess_of, layer + 1
        if self.lookahead is None or of is None or after >= self._geometry.layers:
            return None
        if self._direct is not None and self._direct.slots_of(after) is not None:
            return None
        return of(after)

    # -- slots -------------------------------------------------------------------------------------------------

    def hand_over(self, heat: np.typing.NDArray[np.float64] | None) -> None:
        """Give the device the slots as they are, and heat [L, E] if there is any news. Between steps."""
        table, owners = self._slots.hand_over()
        self._device.give(table, owners, heat)
        self._sure = False

    def promote(self, keys: Iterable[int]) -> None:
        """Have rows read into the arena in the background, unless it has them."""
        self._want(key for key in keys if not self._cache.holds(key))

    def _follow(self, events: Events, counted: Counted) -> None:
        """Bring the mirror of slots and the arena's order up to date. counted: of the passes whose log that is."""
        admitted = events.admitted
        rows = int(np.count_nonzero(admitted))
        self.counts.rows += rows
        self.counts.arena_misses += len(events.keys) - rows
        if rows:
            keys, evicted = events.keys[admitted], events.evicted[admitted]
            layers = keys // self._geometry.experts
            self.counts.by_layer += np.bincount(layers, minlength=self._geometry.layers)
            self._slots.follow(keys, events.slots[admitted], evicted)
            if not self._cache.full:  # nothing is evicted from an arena that has all
                steady: IntArray = counted.steady.reshape(-1)
                self._cache.touch(keys.tolist(), map(float, steady[keys].tolist()))
                self.promote(key for key in evicted.tolist() if key != ABSENT)

    @property
    def interrupted(self) -> bool:
        """Whether the last pass raised on its way: part of it may still run."""
        return self._pass is not None

    def recover(self) -> None:
        """Look at the device instead of that log. Deferred passes have been collected."""
        self._kernels.settle()
        self._slots.mirror(*self._device.look())
        self._finished()

    def _finished(self) -> None:
        """The pass that was launched last has left the device."""
        epoch, self._pass = self._pass, None
        if epoch is not None:
            self._cache.close_epoch(epoch)

    # -- passes ------------------------------------------------------------------------------------------------

    def begin(self, state: PassState) -> None:
        """Before the forward pass; deferred passes have been collected."""
        tokens = state.step.tokens
        self._device.check(tokens.count)
        self._sure = False
        if state.mode is PassMode.REPLAY:
            self._device.arm(tokens.count, tokens.prefill)
            self._pass = self._cache.launch(self._device.show_places)
        else:
            self._device.arm(tokens.count, None)
            self._streaming = True
            self._streamed.begin(self._slots.table.numpy, tokens, state.step.epoch)

    def end(self) -> None:
        """After a forward pass that followed `begin`, or one that raised. RoutingError for bad ids, if streamed."""
        if self.late.interrupted:
            self._pass = self.late.abandon()
        try:
            if self._streaming:
                self._streaming = False
                self._streamed.end()
        finally:
            self._device.disarm()

    def learn(self, state: PassState) -> None:
        """After a pass of the device: wait for it, and put what it did into its state. RoutingError for bad ids."""
        words = self._device.answer()
        self._finished()
        counted, events = self._device.parse(words), self._device.logged(words)
        self.counts.ahead = self._device.guesses(words)
        self._follow(events, counted)
        check_counted(self._geometry, counted.invalid)
        absent = events.keys[~events.admitted]
        steady = counted.steady.reshape(-1)[absent]
        state.missed.update(zip(absent.tolist(), map(float, steady.tolist()), strict=True))
        state.missing_pairs = counted.missing
        layers, experts = np.nonzero(counted.pairs)
        state.routes.append(Route(layers, experts, counted.pairs[layers, experts]))
        state.count(int(counted.pairs.sum()), counted.absent)

    def begin_sure(self, tokens: StepTokens) -> None:
        """Instead of `begin`, before a pass in which nothing can be missing. Of several such passes only the first one
        starts from zero."""
        if self._sure:
            self._device.arm_again(tokens.count, tokens.prefill)
        else:
            self._device.arm(tokens.count, tokens.prefill)
            self._sure, self._logged = True, 0
            self._admits = self._slots.used < self._rows
        if not self._admits:  # nor reads the arena or changes a slot
            self.late.begun()
            return
        self._events = self._geometry.layers * min(
            self._geometry.experts, tokens.count * self._geometry.top_k
        )
        if self._logged + self._events > self._device.room:
            self._ask()
        if self._cache.version != self._device.places_version:
            self._cache.show(self._device.show_places)
        self.late.begun(self._open)

    def _open(self) -> int:
        return self._cache.launch(self._device.show_places)

    def _ask(self) -> None:
        self.late.ask()
        self._logged = 0

    def defer(self) -> None:
        """Instead of `learn`, after such a pass: what it did comes later, together with others."""
        self.late.launched()
        if self._admits:
            self._logged += self._events
            if self._logged + self._events > self._device.room:  # rather now than ahead of the next pass
                self._ask()

    def collect(self, *, wait: bool) -> LateCounts | None:
        """What has arrived of deferred passes, with `wait` all of it."""
        self.late.ask()
        copies = self.late.arrived(wait=wait)
        if not copies:
            return None
        words = [one.counts.read() for one in copies]
        logs = [self._device.logged(each) for each in words]
        counted = self._device.parse(words[-1])
        self.counts.ahead = self._device.guesses(words[-1])
        self.late.give_back(copies)
        for one in copies:
            if one.epoch is not None:
                self._cache.close_epoch(one.epoch)
        for events in logs:
            self._follow(events, counted)
        self._check_sure(counted, logs)
        passes = sum(one.passes for one in copies)
        # A pass that raised on its way is none of these, but what it did is in the log.
        fetching = min(passes, sum(len(np.unique(events.clocks)) for events in logs))
        return LateCounts(passes, counted.pairs, counted.absent, fetching)

    def _check_sure(self, counted: Counted, logs: list[Events]) -> None:
        check_counted(self._geometry, counted.invalid)
        if counted.missing:
            absent = sorted({key for events in logs for key in events.keys[~events.admitted].tolist()})[:3]
            raise StepError(
                f"{counted.missing} pairs missed in an arena that holds every row, rows {absent} first"
            )
