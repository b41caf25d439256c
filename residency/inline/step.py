"""Which passes a step takes when the device makes its own experts resident.

As in `ziggurat.residency.step`, every decision is a function of numbers that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import numpy as np

from ziggurat.residency.consensus import Consensus
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.host_cache import FillReport
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.layers import InlineLayers
from ziggurat.residency.passes import (
    Outcome,
    PassMode,
    PassPath,
    PassState,
    StepResult,
    StepState,
    StepTokens,
)
from ziggurat.residency.slots import ABSENT, SlotPool
from ziggurat.residency.step import Arm, MissSettings, StepRunner
from ziggurat.residency.streaming.layers import BLIND_PAIRS_PER_EXPERT

T = TypeVar("T")

#: A prompt passes by the pool if the experts that it can be routed to, in all layers together, would take more than
#: this part of the slots: one in PROMPT_SHARE. A shorter one leaves most of what decoding needs where it is.
PROMPT_SHARE = 4


class InlineStepRunner(StepRunner):
    """Runs steps over `InlineLayers`.

    settle: books deferred passes, waiting for them. report: hears of rows that were read into the arena. admitting: how
    many layers fetch rows; the others are read in place.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        slots: SlotPool,
        fetcher: Fetcher,
        cache: InlineCache,
        consensus: Consensus,
        settings: MissSettings,
        layers: InlineLayers,
        arm: Arm,
        *,
        settle: Callable[[], None],
        report: Callable[[FillReport], None],
        admitting: int,
    ) -> None:
        super().__init__(geometry, slots, fetcher, consensus, settings, layers, arm)
        self._inline = layers
        self._cache = cache
        self._settle = settle
        self._report = report
        self._admitting = admitting
        self._rows = admitting * geometry.experts  # that need a slot
        self._least_slots: int | None = None  # of all ranks
        self._may_be_sure: bool | None = (
            None  # whether every rank has room for every row in its arena or pool
        )
        self._sure = False  # whether every rank holds every row there
        self._whole = False  # and whether that is every rank's pool

    @property
    def mode(self) -> PassMode:
        """Misses are served within the pass."""
        return PassMode.INLINE

    @property
    def complete(self) -> bool:
        """Whether every rank's pool holds every row: then nothing is evicted, and it does not matter that prompts must
        not count as uses."""
        return self._sure and self._whole and self._admitting > 0

    def forget(self) -> None:
        super().forget()
        self._least_slots, self._may_be_sure, self._sure, self._whole = None, None, False, False

    def doubt(self) -> None:
        """From now on rows may leave the arena at any time. Every rank must call it."""
        self._may_be_sure, self._sure, self._whole = False, False, False

    def sure(self, tokens: StepTokens) -> bool:
        if not self._sure or self._inline.interrupted:
            return False
        if self._whole and self._admitting:  # nothing is evicted by whatever is admitted
            return tokens.count <= self._inline.most_tokens
        return not self._passes_by(tokens)

    def run(self, forward: Callable[[PassPath], T], step: StepState) -> StepResult[T]:
        """One step. What `forward` raises goes through; a failed read does not raise."""
        try:
            if self._inline.interrupted:
                self._settle()
                self._inline.recover()
            if self._passes_by(step.tokens):
                self._settle()
                return self._run_inline(forward, step, 0, "streamed")
            if self._nothing_can_be_missing():
                return self._deferred(forward, step)
            self._settle()
            return self._run_waiting(forward, step)
        finally:
            self._arm(None)

    def _passes_by(self, tokens: StepTokens) -> bool:
        """Whether a step goes past the slots: its experts do not fit, or a prompt would evict too many."""
        if self._least_slots is None:
            self._least_slots = min(self._consensus.gather(self._slots.slots))
        g = self._geometry
        if (
            not self._admitting
        ):  # nothing can be evicted, but a long prompt would read each row many times in place
            return tokens.eager and tokens.count * g.top_k >= BLIND_PAIRS_PER_EXPERT * g.experts
        if tokens.count > self._inline.most_tokens:
            return True
        if min(g.experts, tokens.count * g.top_k) > self._least_slots:
            return True
        if tokens.prefill is None or self._least_slots >= self._rows:
            return False
        prompt = int(tokens.prefill.sum())
        return self._admitting * min(g.experts, prompt * g.top_k) * PROMPT_SHARE > self._least_slots

    def _nothing_can_be_missing(self) -> bool:
        """Whether every rank has every row in its arena, or in its pool. All ranks ask at the same steps: at every one
        until it is so, if all have room for that; otherwise once."""
        if self._sure:
            return True
        rows = self._geometry.rows
        if self._may_be_sure is None:
            room = self._cache.capacity >= rows or self._slots.slots >= self._rows
            self._may_be_sure = self._consensus.sum(int(not room)) == 0
        if self._may_be_sure:
            complete = self._slots.used >= self._rows
            self._sure = self._consensus.sum(int(not (self._cache.full or complete))) == 0
            if self._sure:
                self._whole = self._consensus.sum(int(not complete)) == 0
                self._sure_outcome = "clean" if complete else "inline"
        return self._sure

    def _run_waiting(self, forward: Callable[[PassPath], T], step: StepState) -> StepResult[T]:
        """Passes that find in the arena what they need, repeated after what was missing there has been read."""
        try:
            return self._repeat(forward, step)
        finally:
            self._cache.let_go()

    def _repeat(self, forward: Callable[[PassPath], T], step: StepState) -> StepResult[T]:
        for passes in range(1, self._settings.max_replays + 2):
            state = PassState(PassMode.REPLAY, first=passes == 1, step=step)
            value = self._pass(forward, PassPath.GRAPH, state)
            self._inline.learn(state)
            if self._consensus.sum(state.missing_pairs) == 0:
                step.routes = state.routes
                here: Outcome = "inline" if step.missed_pairs else "clean"
                return StepResult(value, here if passes == 1 else "replayed", passes, step.missed_pairs)
            if self._tolerated(state):
                step.routes = state.routes
                self._bring(state, ())
                return StepResult(value, "tolerated", passes, step.missed_pairs)
            if passes > self._settings.max_replays or not self._brought(state):
                self._inline.promote(state.missed)  # the next step is likely to want the same experts
                break
        return self._run_inline(forward, step, passes, "exact")

    def _brought(self, state: PassState) -> bool:
        """Read into the arena what the pass missed there. False on every rank if any rank cannot.

        What the pass took from there stays: the device gives the slot of a row that is not hot away again within the
        pass, so the next one looks for it there. If all that does not fit together, nothing is read.
        """
        keep = self._kept_for(state)
        if self._consensus.sum(int(keep is None)):
            return False
        # A row that failed is tried once more by the eager pass, which knows the tokens that need it.
        return self._consensus.sum(len(state.missed) - self._bring(state, keep or ())) == 0

    def _kept_for(self, state: PassState) -> Collection[int] | None:
        used = np.concatenate(
            [route.layer * self._geometry.experts + route.experts for route in state.routes]
        )
        pooled = self._slots.table.numpy.reshape(-1)[used] != ABSENT
        return self._cache.beside(len(state.missed), used, pooled)

    def _bring(self, state: PassState, keep: Collection[int]) -> int:
        """How many of the missed rows the arena has now."""
        brought = self._cache.bring(state.missed, epoch=state.step.epoch, keep=keep)
        self._report(brought.report)
        return len(brought.arrived)
