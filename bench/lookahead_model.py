"""What guessing the next layer's experts is worth: misses of a simulated pool, guesses against them, and a time model.

A guess is fetched into spare slots while the layer before it runs. A right one saves its row's wait; a wrong one costs
the link, on which rows queue one behind the other, and nothing else: the pool is changed by real routing alone. So all
guesses are judged over the same misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ziggurat.residency.admission_model import AdmissionModel

IdArray = npt.NDArray[np.integer]
Keys = frozenset[int]


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds: of a layer's attention and other dense work, of its experts, of one row on the link."""

    dense: float
    moe: float
    row: float


@dataclass(frozen=True, slots=True)
class LayerMisses:
    """One layer of one step: what it routes to, and what of that has no slot; experts of that layer.

    guessed: what is fetched ahead, the experts guessed that have no slot at the time, the likeliest first.
    """

    routed: Keys
    missing: Keys
    guessed: tuple[int, ...] = ()


class Moment(Enum):
    """When the experts of the next layer are guessed: with its own router known, or once its experts are done."""

    MOE_INPUT = "MoE input"
    LAYER_OUTPUT = "layer output"


def misses(ids: IdArray, guesses: Sequence[IdArray | None], pool: AdmissionModel) -> list[LayerMisses]:
    """One step through the pool. ids [L, T, k]: the routing. guesses: for each layer [T, any], None for no guess."""
    experts = pool.experts
    found = []
    for layer, chosen in enumerate(ids):
        counts = np.bincount(chosen.reshape(-1), minlength=experts)
        routed = np.flatnonzero(counts)
        guess = guesses[layer]
        ahead: tuple[int, ...] = ()
        if guess is not None:
            here = set(pool.resident(layer).tolist())
            # All tokens' first guesses before any second one.
            ahead = tuple(one for one in dict.fromkeys(guess.T.reshape(-1).tolist()) if one not in here)
        missing = pool.admit(layer, routed, counts[routed]) - layer * experts
        found.append(LayerMisses(frozenset(routed.tolist()), frozenset(missing.tolist()), ahead))
    return found


def step_us(layers: Sequence[LayerMisses], times: Times, moment: Moment, *, cancel: bool = False) -> float:
    """Microseconds of a step. Rows go over the link in the order in which they are asked for, one at a time.

    cancel: what turns out to be a wrong guess gives the link up at once, in the middle of its row; otherwise it is
    copied to its end.
    """
    now = link_free = 0.0
    ahead: dict[int, float] = {}  # rows of the layer to come -> when they arrive
    for layer, one in enumerate(layers):
        now += times.dense
        arrived = {expert: at for expert, at in ahead.items() if at <= now}
        waiting = [expert for expert in ahead if expert not in arrived and expert in one.missing]
        if cancel:
            started = {expert: at for expert, at in ahead.items() if at - times.row < now < at}
            link_free = now
            for expert in waiting:  # the one that is on its way goes on, the others move up
                link_free = started.get(expert, link_free + times.row)
                arrived[expert] = link_free
        else:
            arrived |= {expert: ahead[expert] for expert in waiting}
        for expert in sorted(one.missing - arrived.keys()):
            link_free = max(link_free, now) + times.row
            arrived[expert] = link_free
        guessed = layers[layer + 1].guessed if layer + 1 < len(layers) else ()
        here = max([now, *(arrived[expert] for expert in one.missing)]) + times.moe
        asked = now if moment is Moment.MOE_INPUT else here
        ahead = {}
        for expert in guessed:
            link_free = max(link_free, asked) + times.row
            ahead[expert] = link_free
        now = here
    return now


def limit_us(layers: Sequence[LayerMisses], times: Times) -> float:
    """The least a step can take, whatever is known in advance: its work, or its missing rows on the link."""
    return max(
        len(layers) * (times.dense + times.moe), times.row * sum(len(layer.missing) for layer in layers)
    )
