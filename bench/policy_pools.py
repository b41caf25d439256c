"""Pools without memory that are used as a layer on the device uses its own: who leaves is another's choice in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ziggurat.residency.policies.registry import make_policy

IntArray = npt.NDArray[np.int64]


class PoolStep(NamedTuple):
    """One layer of one step: experts [n] that it is routed to, ascending, and pairs [n] of each."""

    experts: IntArray
    pairs: IntArray


class Pool(Protocol):
    """See `ziggurat.residency.admission_model.AdmissionModel`."""

    def admit(self, layer: int, experts: IntArray, steady: IntArray) -> IntArray:
        """The keys that had no slot; those that found one have it now."""
        ...


class HostPool:
    """Slots under one of the host's eviction policies: a layer's experts are used first, then the missing brought."""

    def __init__(self, layers: int, experts: int, slots: int, policy: str) -> None:
        self._policy = make_policy(policy)
        self._experts = experts
        self._slots = slots
        self._held: set[int] = set()

    def admit(self, layer: int, experts: IntArray, steady: IntArray) -> IntArray:
        if layer == 0:
            self._policy.advance()
        keys = experts + layer * self._experts
        weights = dict(zip(keys.tolist(), map(float, steady.tolist()), strict=True))
        missing = [key for key in weights if key not in self._held]
        for key in weights.keys() & self._held:
            self._policy.touch(key, weights[key])
        for key in missing:
            if len(self._held) == self._slots:
                victim = self._policy.victim(weights)
                if victim is None:
                    break
                self._policy.remove(victim)
                self._held.remove(victim)
            self._policy.insert(key, weights[key])
            self._held.add(key)
        return np.array(missing, dtype=np.int64)


class BeladyPool:
    """Evicts what is wanted again last, or never. It must be asked for the very steps that it was made with."""

    def __init__(self, layers: int, experts: int, slots: int, steps: Sequence[Sequence[PoolStep]]) -> None:
        self._experts = experts
        self._never = len(steps) * layers
        uses: dict[int, list[int]] = defaultdict(list)
        for step in range(len(steps) - 1, -1, -1):
            for layer in range(layers):
                for expert in steps[step][layer].experts.tolist():
                    uses[layer * experts + expert].append(step * layers + layer)
        self._uses = uses  # last use first, so that the next one is popped from the end
        self._owners = np.full(slots, -1, dtype=np.int64)
        # When each slot's row is wanted again; a slot without a row is free, which is better than never.
        self._next = np.full(slots, self._never + 1, dtype=np.int64)
        self._slot_of: dict[int, int] = {}

    def admit(self, layer: int, experts: IntArray, steady: IntArray) -> IntArray:
        keys = (experts + layer * self._experts).tolist()
        missing = [key for key in keys if key not in self._slot_of]
        used = [self._slot_of[key] for key in keys if key in self._slot_of]
        for key in keys:
            self._uses[key].pop()
        self._next[used] = -1  # not before the layer is done
        for key in missing:
            slot = int(self._next.argmax())
            if self._next[slot] < 0:
                break
            self._slot_of.pop(int(self._owners[slot]), None)
            self._owners[slot], self._slot_of[key] = key, slot
            self._next[slot] = -1
            used.append(slot)
        for slot in used:
            uses = self._uses[int(self._owners[slot])]
            self._next[slot] = uses[-1] if uses else self._never
        return np.array(missing, dtype=np.int64)
