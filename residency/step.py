"""The step protocol: which forward passes a step runs, and what is fetched between them.

Every decision here is a function of numbers summed over the ranks, so that all ranks run the same passes. Nothing is
raised between two collectives: a failed read is recorded, its contribution is left out, the pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ziggurat.residency.consensus import Consensus
from ziggurat.residency.fetch import Entry, Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import (
    BoolArray,
    Outcome,
    PassMode,
    PassPath,
    PassState,
    RowFailure,
    StepResult,
    StepState,
    StepTokens,
)
from ziggurat.residency.slots import SlotPool

T = TypeVar("T")
Arm = Callable[[PassState | None], None]


@dataclass(frozen=True, slots=True)
class MissSettings:
    """mode: how the first pass treats misses. tolerance: missing pairs on the worst rank that a step may keep.

    replay_enabled=False keeps whatever the first pass computed; it exists to show that tests can fail.
    """

    mode: PassMode
    max_replays: int = 2
    tolerance: int = 0
    replay_enabled: bool = True


class Layers(Protocol):
    """What runs the layers of a pass, seen from outside the pass."""

    @property
    def defers(self) -> bool:
        """Whether reading what a pass counted means to wait for it, so that it is better put off."""
        ...

    def begin(self, state: PassState) -> None:
        """Before each forward pass."""
        ...

    def end(self) -> None:
        """After each forward pass that followed `begin`, and after every one that raised."""
        ...

    def learn(self, state: PassState) -> None:
        """After a replay pass: complete its state."""
        ...

    def begin_sure(self, tokens: StepTokens) -> None:
        """Instead of `begin`, before a pass that cannot miss."""
        ...

    def defer(self) -> None:
        """After such a pass, instead of `end` and `learn`: its counts come later, with those of others."""
        ...


class StepRunner:
    """Runs steps. `arm` is called with the state of each pass before it and with None after the last one."""

    _sure_outcome: Outcome = "clean"  # of a step that nobody waits for, as far as it is known

    def __init__(
        self,
        geometry: ServiceGeometry,
        slots: SlotPool,
        fetcher: Fetcher,
        consensus: Consensus,
        settings: MissSettings,
        layers: Layers,
        arm: Arm,
    ) -> None:
        self._geometry = geometry
        self._slots = slots
        self._fetcher = fetcher
        self._consensus = consensus
        self._settings = settings
        self._layers = layers
        self._arm = arm
        self._may_complete: bool | None = None  # whether all ranks' pools have a slot for every row
        self._complete = False  # whether all ranks' pools hold every row
        self._sure_state: PassState | None = None  # of the step before, if that could not miss

    @property
    def mode(self) -> PassMode:
        """How a step's first pass treats misses."""
        return self._settings.mode

    @property
    def complete(self) -> bool:
        """Whether every rank's pool is known to hold every row."""
        return self._complete

    def forget(self) -> None:
        """The pool has started anew."""
        self._may_complete, self._complete = None, False

    def run(self, forward: Callable[[PassPath], T], step: StepState) -> StepResult[T]:
        """One step. What `forward` raises goes through; a failed read does not raise."""
        try:
            if self._settings.mode is PassMode.INLINE:
                return self._run_inline(forward, step, 0, "clean")
            if self._nothing_can_miss():
                return self._deferred(forward, step)
            if step.tokens.eager:
                return self._run_inline(forward, step, 0, "clean")
            return self._run_replay(forward, step)
        finally:
            self._arm(None)

    def _nothing_can_miss(self) -> bool:
        """Whether every rank's pool holds every row. All ranks ask at the same steps: at every one until it is so, if
        their pools have room for every row; otherwise once."""
        if not self._layers.defers or self._complete:
            return self._complete
        if self._may_complete is None:
            self._may_complete = self._consensus.sum(int(self._slots.slots < self._geometry.rows)) == 0
        if self._may_complete:
            self._complete = self._consensus.sum(int(not self._slots.complete)) == 0
        return self._complete

    def _pass(self, forward: Callable[[PassPath], T], path: PassPath, state: PassState) -> T:
        self._arm(state)
        try:
            self._layers.begin(state)
            return forward(path)
        finally:
            self._layers.end()

    def sure(self, tokens: StepTokens) -> bool:
        """Whether earlier steps have settled that nothing can miss in this one, on any rank."""
        return self._complete

    def run_sure(self, forward: Callable[[PassPath], T], tokens: StepTokens) -> StepResult[T]:
        """A step of which `sure` says so, or has just been found out: nobody waits for what it counts."""
        state = self._sure_state
        if state is None or state.step.tokens.count != tokens.count:
            # Such a pass leaves nothing in its state, so that the next one may have it.
            state = self._sure_state = PassState(PassMode.REPLAY, True, StepState(tokens, 0, deferred=True))
        self._arm(state)
        try:
            self._layers.begin_sure(tokens)
            value = forward(PassPath.GRAPH)
        except BaseException:
            self._layers.end()
            raise
        finally:
            self._arm(None)
        self._layers.defer()
        return StepResult(value, self._sure_outcome, 1, 0)

    def _deferred(self, forward: Callable[[PassPath], T], step: StepState) -> StepResult[T]:
        step.deferred = True
        return self.run_sure(forward, step.tokens)

    def _run_inline(
        self, forward: Callable[[PassPath], T], step: StepState, passes: int, outcome: Outcome
    ) -> StepResult[T]:
        """A pass that serves its misses layer by layer and so cannot miss; the last one of any step."""
        state = PassState(PassMode.INLINE, first=passes == 0, step=step)
        value = self._pass(forward, PassPath.EAGER, state)
        failures, failed_tokens = self._agree_on_failures(state)
        step.routes = state.routes
        return StepResult(
            value,
            "failed" if failures else outcome,
            passes + 1,
            step.missed_pairs,
            failures,
            failed_tokens,
        )

    def _run_replay(self, forward: Callable[[PassPath], T], step: StepState) -> StepResult[T]:
        """Passes that leave missing experts out, repeated until none is missing, or until inline takes over."""
        for passes in range(1, self._settings.max_replays + 2):
            state = PassState(PassMode.REPLAY, first=passes == 1, step=step)
            value = self._pass(forward, PassPath.GRAPH, state)
            self._layers.learn(state)
            if self._consensus.sum(state.missing_pairs) == 0:
                self._accept(state)
                return StepResult(value, "clean" if passes == 1 else "replayed", passes, step.missed_pairs)
            if self._tolerated(state):
                self._accept(state)
                self._fetch_for_later(state)
                return StepResult(value, "tolerated", passes, step.missed_pairs)
            if passes > self._settings.max_replays or not self._repair(state):
                break
        return self._run_inline(forward, step, passes, "exact")

    def _accept(self, state: PassState) -> None:
        """The step returns this replay pass's result, so its routing is the one that counts."""
        self._slots.touch(state.used)
        state.step.routes = state.routes

    def _tolerated(self, state: PassState) -> bool:
        if not self._settings.replay_enabled:
            return True
        if self._settings.tolerance == 0:
            return False
        return self._consensus.sum(int(state.missing_pairs > self._settings.tolerance)) == 0

    def _repair(self, state: PassState) -> bool:
        """Fetch what the pass missed, keeping what it used. False on every rank if any rank cannot.

        Pinned are the experts of this pass only: those that an earlier, wrong pass wanted may go. If they do not
        fit together, nothing is fetched, because the inline pass would evict it again.
        """
        fits = len(state.used) + len(state.missed) <= self._slots.slots
        if self._consensus.sum(int(not fits)):
            return False
        outcome = self._fetcher.fetch(
            state.missed, blocked=state.used, epoch=state.step.epoch, entry=Entry.UNPROVEN
        )
        # A row that failed is tried once more by the inline pass, which knows the tokens that need it.
        return self._consensus.sum(len(state.missed) - len(outcome.arrived)) == 0

    def _fetch_for_later(self, state: PassState) -> None:
        """The result stands without them, but the next step is likely to want the same experts."""
        self._fetcher.fetch(state.missed, blocked=(), epoch=state.step.epoch)

    def _agree_on_failures(self, state: PassState) -> tuple[tuple[RowFailure, ...], BoolArray | None]:
        """Failures and failed tokens of all ranks, the same on every rank."""
        if self._consensus.sum(len(state.failures)) == 0:
            return (), None
        mine = [
            RowFailure(self._geometry.layer_ids[layer], expert, self._consensus.rank, reason)
            for key, reason in sorted(state.failures.items())
            for layer, expert in [self._geometry.split(key)]
        ]
        everyone = self._consensus.gather((mine, state.failed_tokens))
        failures = tuple(failure for theirs, _ in everyone for failure in theirs)
        masks = [mask for _, mask in everyone if mask is not None]
        return failures, np.logical_or.reduce(masks)
