"""Pools without rows: which keys are in, which come, which go."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

from ziggurat.residency.passes import IntArray
from ziggurat.residency.policies.base import EvictionPolicy

Keys = Sequence[int]
Below = Callable[[Keys, Keys], None]
"""Hears of the keys and weights that a pool brings, a batch at a time; see `ziggurat.residency.simulation.host`."""


class SimulatedPool(Protocol):
    """What one event after the other happens to. `fetched` and `evictions` count rows since the pool was made."""

    @property
    def fetched(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def used(self) -> int:
        """Keys in the pool."""
        ...

    @property
    def capacity(self) -> int:
        """Keys there is room for."""
        ...

    def event(self, layer: int, keys: Keys, weights: Keys, ids: IntArray | None) -> list[int]:
        """A layer is routed to `keys` (distinct, ascending; weight 0: by prefill only) and all of them become resident.

        ids: int [T, k], the choices of its tokens that are not prefill, or None for pools that do not ask for them.
        Returns the positions in `keys` of those that were not resident.
        """
        ...

    def end_step(self) -> None:
        """All layers of a step have run."""
        ...


class PolicyPool:
    """A pool under an eviction policy, as `ziggurat.residency.slots.SlotPool` keeps it.

    atomic: the keys of an event may not be evicted during it, if they fit. False: anything may be, as where the host
    computes a layer in rounds; then the counts are exactly those of a service with that policy.
    routed: whether to tell the policy of every token.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: int, *, atomic: bool = True, routed: bool = True
    ) -> None:
        self.fetched = 0
        self.evictions = 0
        self.policy = policy
        self.capacity = capacity
        self._atomic = atomic
        self._routed = routed
        self._held: set[int] = set()
        self.below: Below | None = None

    @property
    def used(self) -> int:
        return len(self._held)

    def event(self, layer: int, keys: Keys, weights: Keys, ids: IntArray | None) -> list[int]:
        policy, held = self.policy, self._held
        if self._routed and ids is not None:
            policy.routed(layer, ids)
        touch = policy.touch
        absent = []
        for position, key in enumerate(keys):
            if key in held:
                touch(key, weights[position])
            else:
                absent.append(position)
        if absent:
            fits = self._atomic and len(keys) <= self.capacity
            self._bring(keys, weights, absent, set(keys) if fits else ())
        return absent

    def end_step(self) -> None:
        self.policy.advance()

    def _bring(self, keys: Keys, weights: Keys, absent: list[int], blocked: Container[int]) -> None:
        policy, held = self.policy, self._held
        for portion in self._portions(weights, absent):
            for _ in range(len(portion) + len(held) - self.capacity):
                victim = policy.victim(blocked)
                assert victim is not None, "what is blocked and what comes fit together"
                policy.remove(victim)
                held.remove(victim)
                self.evictions += 1
            for position in portion:
                policy.insert(keys[position], weights[position])
                held.add(keys[position])
            self.fetched += len(portion)
            if self.below is not None:
                self.below(
                    [keys[position] for position in portion], [weights[position] for position in portion]
                )

    def _portions(self, weights: Keys, absent: list[int]) -> Iterator[list[int]]:
        """As `ziggurat.residency.rounds`: what only a scan wants comes last, in at most half a full pool at a time."""
        if weights[absent[0]] and len(absent) == 1:
            yield absent
            return
        wanted = [position for position in absent if weights[position]]
        scanned = [position for position in absent if not weights[position]]
        for start in range(0, len(wanted), self.capacity):
            yield wanted[start : start + self.capacity]
        size = max(1, self.capacity - len(self._held), self.capacity // 2)
        for start in range(0, len(scanned), size):
            yield scanned[start : start + size]


class LayerPools:
    """A pool of its own for each layer; keys of the layers' pools are expert numbers."""

    def __init__(self, pools: Sequence[PolicyPool], experts: int) -> None:
        self._pools = pools
        self._experts = experts

    def tell(self, below: Below) -> None:
        """Have `below` hear what the pools bring, by keys of the model."""
        for layer, pool in enumerate(self._pools):
            pool.below = self._shifted(below, layer * self._experts)

    @staticmethod
    def _shifted(below: Below, first: int) -> Below:
        return lambda keys, weights: below([first + key for key in keys], weights)

    @property
    def fetched(self) -> int:
        return sum(pool.fetched for pool in self._pools)

    @property
    def evictions(self) -> int:
        return sum(pool.evictions for pool in self._pools)

    @property
    def used(self) -> int:
        return sum(pool.used for pool in self._pools)

    @property
    def capacity(self) -> int:
        return sum(pool.capacity for pool in self._pools)

    def event(self, layer: int, keys: Keys, weights: Keys, ids: IntArray | None) -> list[int]:
        first = layer * self._experts
        return self._pools[layer].event(0, [key - first for key in keys], weights, ids)

    def end_step(self) -> None:
        for pool in self._pools:
            pool.end_step()
