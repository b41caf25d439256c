"""From a trace to what a pool sees: steps of layers, each with the experts its tokens are routed to.

A step's tokens are one position of each of `batch` sequences that are decoded side by side; a sequence that has ended
is replaced by the next one. A sequence with a prompt brings the whole of it in its first step, as prefill: a scan.
A trace that recorded the steps of a run (`batches`) is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ziggurat.residency.passes import BoolArray, IntArray
from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.trace import Trace


@dataclass(frozen=True)
class Steps:
    """tokens: int64 [N], flat token numbers (sequence * positions + position) in the order they are computed.
    bounds: int64 [steps + 1]. prefill: bool [N]."""

    tokens: IntArray
    bounds: IntArray
    prefill: BoolArray

    @property
    def count(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class Events:
    """One event is one layer in one step; event number = step * layers + layer.

    bounds: int64 [events + 1] into experts, pairs, weights, int64 each: the distinct experts of each event in
    ascending order, the pairs routed to each, and how many of those are not prefill.
    ids: int64 [N, L, k], the tokens in the order of `steps`.
    """

    layers: int
    experts_per_layer: int
    steps: Steps
    ids: IntArray
    bounds: IntArray
    experts: IntArray
    pairs: IntArray
    weights: IntArray

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def decoding(self, step: int) -> IntArray:
        """Indices of the tokens of a step that are not prefill."""
        first, last = self.steps.bounds[step], self.steps.bounds[step + 1]
        found: IntArray = first + np.flatnonzero(~self.steps.prefill[first:last])
        return found


def make_steps(trace: Trace, batch: int) -> Steps:
    """The steps of `batch` sequences at a time; of the recorded run if the trace has one (`batch` is then ignored)."""
    if trace.batches is not None:
        tokens = np.arange(trace.positions, dtype=np.int64)
        prefill = np.zeros(trace.positions, dtype=np.bool_) if trace.prefill is None else trace.prefill
        return Steps(tokens, trace.batches, prefill)
    if batch < 1:
        raise SimulationError(f"a batch has at least 1 sequence, not {batch}")
    waiting = [s for s in range(trace.sequences) if trace.lengths[s] > 0]
    if not waiting:
        raise SimulationError(f"{trace.name} has no token")
    waiting.reverse()
    lanes: list[tuple[int, int]] = []
    while waiting and len(lanes) < batch:
        lanes.append((waiting.pop(), 0))
    tokens_of: list[IntArray] = []
    flags: list[BoolArray] = []
    sizes = [0]
    while lanes:
        following: list[tuple[int, int]] = []
        size = 0
        for sequence, position in lanes:
            prompt = int(trace.prompts[sequence]) if position == 0 else 0
            count = max(1, prompt)
            start = sequence * trace.positions + position
            tokens_of.append(np.arange(start, start + count, dtype=np.int64))
            flags.append(np.full(count, prompt > 0, dtype=np.bool_))
            size += count
            if position + count < trace.lengths[sequence]:
                following.append((sequence, position + count))
            elif waiting:
                following.append((waiting.pop(), 0))
        sizes.append(size)
        lanes = following
    bounds = np.cumsum(np.array(sizes, dtype=np.int64))
    return Steps(np.concatenate(tokens_of), bounds, np.concatenate(flags))


def make_events(trace: Trace, batch: int) -> Events:
    """All events of a trace at a batch size. Vectorised: no Python per token after the steps are made."""
    steps = make_steps(trace, batch)
    ids = trace.ids.reshape(-1, trace.layers, trace.top_k)[steps.tokens].astype(np.int64)
    step_of = np.repeat(np.arange(steps.count, dtype=np.int64), np.diff(steps.bounds))
    event_of = step_of[:, None] * trace.layers + np.arange(trace.layers)
    codes = (event_of[:, :, None] * trace.experts + ids).reshape(-1)
    order = np.argsort(codes, kind="stable")
    ranked = codes[order]
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1]))) if len(ranked) else order
    found = ranked[starts]
    pairs = np.diff(np.append(starts, len(ranked)))
    decode = np.repeat(~steps.prefill, trace.layers * trace.top_k)[order].astype(np.int64)
    weights = np.add.reduceat(decode, starts) if len(starts) else np.zeros(0, dtype=np.int64)
    counts = np.bincount(found // trace.experts, minlength=steps.count * trace.layers)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    return Events(
        trace.layers,
        trace.experts,
        steps,
        ids,
        bounds,
        found % trace.experts,
        pairs,
        weights,
    )
