"""What an eviction policy is: an order over the keys that are resident right now."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.integer]
NO_IDS: IdArray = np.zeros((0, 0), dtype=np.int64)
"""For `routed` where only the layer is known."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Parameters a policy may use. Wall time never enters an eviction decision.

    half_life: steps after which a use counts half; None: the policy's own.
    layers, experts: key = layer * experts + expert; experts = 0: nothing is known about what keys mean.
    """

    half_life: float | None = None
    layers: int = 1
    experts: int = 0


class EvictionPolicy(Protocol):
    """Chooses which key leaves when room is needed. Keys are ints; every operation is O(log n) or better,
    except that `victim` may look at each blocked key once.

    A policy is deterministic: the same calls in the same order give the same victims on every machine.

    Weights are numbers of routed (token, choice) pairs. Weight 0 means "wanted by a scan only": such a key
    is inserted at the cold end and a touch with weight 0 changes nothing, so that a long prefill recycles
    its own rows instead of the decode set.
    """

    name: str

    def insert(self, key: int, weight: float = 1.0) -> None:
        """Start to hold `key`. PolicyError if it is held already."""

    def seed(self, key: int, heat: float) -> None:
        """Start to hold `key` because earlier runs used it. Called hottest first; whatever was used since this
        policy was made and is as frequent stays longer. PolicyError if it is held already."""

    def touch(self, key: int, weight: float = 1.0) -> None:
        """Record a use of `key`. PolicyError if it is not held."""

    def remove(self, key: int) -> None:
        """Stop holding `key`. PolicyError if it is not held."""

    def victim(self, blocked: Container[int]) -> int | None:
        """The key to evict next, not removed yet; never one in `blocked`; None if all are blocked.

        A policy may settle its books here (a hand moves on); asking again gives the same answer.
        """

    def routed(self, layer: int, ids: IdArray) -> None:
        """A layer's tokens that are not prefill have been routed: ids [T, k], before its touches and victims.

        Token t of every layer of a step is one sequence's, and where the batch stays the same, of every step.
        A policy that is never told works all the same.
        """

    def advance(self, steps: int = 1) -> None:
        """Let `steps` steps of the model pass."""

    def __len__(self) -> int:
        """How many keys are held."""

    def order(self) -> list[int]:
        """All held keys, hottest first (last to be evicted first). O(n log n); for saving and tests."""
