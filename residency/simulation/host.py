"""The tier below the pool: rows that a pool lacks are asked of an arena, and what that lacks is read from the pack.

A pool is simulated once and its requests are kept; any number of arenas can then be asked for them. An arena here does
what `ziggurat.residency.host_cache` does for requests of the host, batch by batch, so that the counts are those of the
service.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ziggurat.residency.passes import IntArray
from ziggurat.residency.policies.base import NO_IDS, EvictionPolicy, PolicySettings
from ziggurat.residency.policies.registry import host_half_life, host_policy_names, make_host_policy
from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.requests import Requests
from ziggurat.residency.simulation.simulate import BOUND

READS_IN_FLIGHT: Final = 8
"""Places for reads in flight, as many as `tiers.disk.readers` has by default."""


def simulated_host_names() -> tuple[str, ...]:
    """Everything that an arena can be simulated under: the policies that it can have, and the bound."""
    return (*host_policy_names(), BOUND)


@dataclass(frozen=True)
class HostResult:
    """One arena under one policy. asked, read, waited: int64 [steps], rows that the pool asked for, those of them that
    the pack was read for, and those of these that somebody other than a prompt wanted. cold: steps until the arena was
    full for the first time."""

    policy: str
    places: int
    asked: IntArray
    read: IntArray
    waited: IntArray
    evictions: int
    cold: int

    def to_json(self) -> dict[str, Any]:
        """Counts of all steps and means of those after the arena was full (of all, if it never was)."""
        first = self.cold if self.cold < len(self.asked) else 0
        asked, read = int(self.asked.sum()), int(self.read.sum())
        return {
            "policy": self.policy,
            "places": self.places,
            "asked": asked,
            "read": read,
            "evictions": self.evictions,
            "cold_steps": self.cold,
            "hit_ratio": round(1 - read / asked, 6) if asked else None,
            "asked_per_step": round(float(self.asked[first:].mean()), 4),
            "read_per_step": round(float(self.read[first:].mean()), 4),
            "waited_per_step": round(float(self.waited[first:].mean()), 4),
            "no_read_share": round(float((self.read[first:] == 0).mean()), 6),
        }


class SimulatedArena:
    """Which rows an arena holds. staging: places through which rows pass that may not displace anything."""

    def __init__(
        self, policy: EvictionPolicy, places: int, experts: int, staging: int = READS_IN_FLIGHT
    ) -> None:
        self.policy = policy
        self._experts = experts
        self.places = places
        self.evictions = 0
        self._staging = staging
        self._held: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._held)

    def ask(self, keys: Sequence[int], weights: Sequence[int]) -> list[int]:
        """A batch of distinct keys; the positions of those that had to be read."""
        policy, held = self.policy, self._held
        policy.routed(keys[0] // self._experts, NO_IDS)
        read = []
        for position, key in enumerate(keys):
            if key in held:
                policy.touch(key, weights[position])
            else:
                read.append(position)
        waiting = list(read)
        while waiting:
            coming, waiting, passing = waiting, [], 0
            cached: list[int] = []
            for position in coming:
                if self._make_room(weights[position] > 0, len(cached)):
                    cached.append(position)
                elif passing < self._staging:
                    passing += 1
                else:
                    waiting.append(position)
            for position in cached:
                policy.insert(keys[position], weights[position])
                held.add(keys[position])
        return read

    def end_step(self) -> None:
        self.policy.advance()

    def _make_room(self, evicts: bool, coming: int) -> bool:
        """Whether one more row finds a place beside `coming` others that are on their way."""
        if len(self._held) + coming < self.places:
            return True
        victim = self.policy.victim(()) if evicts else None
        if victim is None:
            return False
        self.policy.remove(victim)
        self._held.remove(victim)
        self.evictions += 1
        return True


class BoundArena:
    """The bound: of what it holds and what comes, the row that is asked for last is not kept (Belady, 1966)."""

    def __init__(self, requests: Requests, places: int) -> None:
        self.places = places
        self.evictions = 0
        keys = [key for batch, _ in requests.batches for key in batch]
        self._following = [0] * len(keys)
        latest: dict[int, int] = {}
        for at in range(len(keys) - 1, -1, -1):
            self._following[at] = latest.get(keys[at], len(keys))
            latest[keys[at]] = at
        self._at = 0
        self._uses: dict[int, int] = {}  # held key -> its next request
        self._heap: list[tuple[int, int]] = []  # (-next request, key), lazy

    @property
    def used(self) -> int:
        return len(self._uses)

    def ask(self, keys: Sequence[int], weights: Sequence[int]) -> list[int]:
        uses, heap = self._uses, self._heap
        read = []
        for position, key in enumerate(keys):
            if key not in uses:
                read.append(position)
            uses[key] = self._following[self._at]
            heapq.heappush(heap, (-uses[key], key))
            self._at += 1
            while len(uses) > self.places:
                negative, last = heapq.heappop(heap)
                if uses.get(last) == -negative:
                    del uses[last]
                    self.evictions += 1
        return read

    def end_step(self) -> None:
        """Knowing the future needs no clock."""


def run_arena(
    requests: Requests,
    policy: str,
    places: int,
    *,
    settings: PolicySettings | None = None,
    floor: float | None = None,
    staging: int = READS_IN_FLIGHT,
) -> HostResult:
    """All requests through an arena of `places` places under a policy of `simulated_host_names`.

    settings: its half-life counts, None is the one that the service chooses. floor: as `policy.host_floor`.
    SimulationError for an unknown policy.
    """
    if policy not in simulated_host_names():
        raise SimulationError(
            f"an arena has no policy {policy!r}; there are {', '.join(simulated_host_names())}"
        )
    arena: SimulatedArena | BoundArena
    if policy == BOUND:
        arena = BoundArena(requests, places)
    else:
        half_life = None if settings is None else settings.half_life
        if half_life is None:
            half_life = host_half_life(requests.experts, requests.top_k)
        known = PolicySettings(half_life, requests.layers, requests.experts)
        arena = SimulatedArena(
            make_host_policy(policy, known, floor=floor), places, requests.experts, staging
        )
    steps = len(requests.steps)
    asked, read, waited = (np.zeros(steps, dtype=np.int64) for _ in range(3))
    cold = steps
    for step, batches in enumerate(requests.by_step()):
        for keys, weights in batches:
            absent = arena.ask(keys, weights)
            asked[step] += len(keys)
            read[step] += len(absent)
            waited[step] += sum(weights[position] > 0 for position in absent)
        arena.end_step()
        if cold == steps and arena.used >= places:
            cold = step + 1
    return HostResult(policy, places, asked, read, waited, arena.evictions, cold)
