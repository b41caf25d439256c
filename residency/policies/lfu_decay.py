"""Least frequently used, with frequencies that decay by steps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container

from ziggurat.residency.heat import HALF_LIFE_STEPS
from ziggurat.residency.policies.base import IdArray, PolicySettings
from ziggurat.residency.runtime_errors import PolicyError

HALF_LIFE = 256.0  # steps
_RESCALE_BITS = 256


class LfuDecayPolicy:
    """Evicts the key with the lowest decayed count of uses; of equal ones the highest key.

    A use at step t is worth 2**((t - now) / half_life). All counts decay at the same rate, so their order
    does not change while time passes; the policy therefore keeps them in units of a fixed past step, where a
    new use simply weighs more (2**((now - base) / half_life)), and a heap over them never needs a sweep. The
    base is moved forward before those weights leave float64's range; the factor is a power of two: exact.

    Counts of evicted keys are remembered: an expert that comes back resumes its history.
    """

    name = "lfu-decay"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        given = (settings or PolicySettings()).half_life
        half_life = HALF_LIFE if given is None else given
        if not half_life > 0.0:
            raise PolicyError(f"lfu-decay: half_life is {half_life} steps; it must be greater than 0")
        self._half_life = half_life
        self._age = 0.0  # half-lives since the base step
        self._scores: dict[int, float] = {}  # every key ever held, in units of the base step
        self._held: set[int] = set()
        self._heap: list[tuple[float, int]] = []  # (score, -key), lazy: counts only while it matches _scores

    def insert(self, key: int, weight: float = 1.0) -> None:
        if key in self._held:
            raise PolicyError(f"lfu-decay: key {key} is inserted already; remove it first")
        self._held.add(key)
        self._set(key, self._scores.get(key, 0.0) + weight * self._unit())

    def seed(self, key: int, heat: float) -> None:
        # Sums of decayed uses grow with the half-life, which differs: unscaled, old habits would outweigh new ones.
        self.insert(key, heat * self._half_life / HALF_LIFE_STEPS)

    def touch(self, key: int, weight: float = 1.0) -> None:
        if key not in self._held:
            raise PolicyError(f"lfu-decay: key {key} was touched but is not held; insert it first")
        if weight > 0.0:
            self._set(key, self._scores[key] + weight * self._unit())

    def remove(self, key: int) -> None:
        if key not in self._held:
            raise PolicyError(f"lfu-decay: key {key} cannot be removed, it is not held")
        self._held.remove(key)

    def victim(self, blocked: Container[int]) -> int | None:
        skipped: list[tuple[float, int]] = []
        found: int | None = None
        while self._heap:
            score, key = self._heap[0][0], -self._heap[0][1]
            if key not in self._held or score != self._scores[key]:
                heapq.heappop(self._heap)
            elif key in blocked:
                skipped.append(heapq.heappop(self._heap))
            else:
                found = key
                break
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def routed(self, layer: int, ids: IdArray) -> None:
        """Keys alone decide: nothing to do."""

    def advance(self, steps: int = 1) -> None:
        self._age += steps / self._half_life
        if self._age >= _RESCALE_BITS:
            self._rescale()

    def __len__(self) -> int:
        return len(self._held)

    def order(self) -> list[int]:
        return sorted(self._held, key=lambda key: (-self._scores[key], key))

    def _unit(self) -> float:
        return float(2.0**self._age)

    def _set(self, key: int, score: float) -> None:
        self._scores[key] = score
        heapq.heappush(self._heap, (score, -key))
        if len(self._heap) > 4 * len(self._held) + 64:
            self._rebuild()

    def _rescale(self) -> None:
        periods = int(self._age // _RESCALE_BITS)
        self._age -= periods * _RESCALE_BITS
        scaled = ((key, math.ldexp(score, -periods * _RESCALE_BITS)) for key, score in self._scores.items())
        self._scores = {key: score for key, score in scaled if score > 0.0 or key in self._held}
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._scores[key], -key) for key in self._held]
        heapq.heapify(self._heap)
