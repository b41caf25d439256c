"""Heat weighted by distance: how often a row is used, and how many layers run before it can be used again."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container

from ziggurat.residency.policies.base import IdArray, PolicySettings
from ziggurat.residency.runtime_errors import PolicyError

HALF_LIFE = 16.0  # steps
_RESCALE_BITS = 256
_STEP_BITS = 1.0  # a use one step later is worth half as much


class HeatWeightedPolicy:
    """Evicts the row whose next use is worth least: decayed frequency of uses, halved for every step until its layer
    runs again and by 2**(-d / layers) for the d layers in between.

    The row of the layer that has just run has a whole step ahead of it, that of the next layer none; with equal heat
    the first one leaves. In each layer there is a heap of heats, whose order time does not change (see lfu-decay), so
    a victim costs one look at each layer. A use counts once a step, however many tokens it serves.
    """

    name = "heat-weighted"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        settings = settings or PolicySettings()
        self._half_life = HALF_LIFE if settings.half_life is None else settings.half_life
        if not self._half_life > 0.0:
            raise PolicyError(
                f"heat-weighted: half_life is {self._half_life} steps; it must be greater than 0"
            )
        self._experts = settings.experts
        self._layers = settings.layers if settings.experts else 1
        self._now = 0  # steps
        self._age = 0.0  # half-lives since the base step
        self._layer = self._layers - 1  # that ran last
        self._scores: dict[int, float] = {}  # every key ever held, in units of the base step
        self._used: dict[int, int] = {}  # step of the last use that counted
        self._held: list[set[int]] = [set() for _ in range(self._layers)]
        self._sizes = [0] * self._layers  # of each heap when it was made
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(self._layers)]
        self._worth = [2.0 ** (-_STEP_BITS * d / self._layers) for d in range(self._layers + 1)]

    def insert(self, key: int, weight: float = 1.0) -> None:
        held = self._held[self._layer_of(key)]
        if key in held:
            raise PolicyError(f"heat-weighted: key {key} is inserted already; remove it first")
        held.add(key)
        self._set(key, self._scores.get(key, 0.0))
        self._count(key, weight)

    def seed(self, key: int, heat: float) -> None:
        held = self._held[self._layer_of(key)]
        if key in held:
            raise PolicyError(f"heat-weighted: key {key} is inserted already; remove it first")
        held.add(key)
        self._set(key, self._scores.get(key, 0.0) + heat * self._unit())

    def touch(self, key: int, weight: float = 1.0) -> None:
        if key not in self._held[self._layer_of(key)]:
            raise PolicyError(f"heat-weighted: key {key} was touched but is not held; insert it first")
        self._count(key, weight)

    def remove(self, key: int) -> None:
        held = self._held[self._layer_of(key)]
        if key not in held:
            raise PolicyError(f"heat-weighted: key {key} cannot be removed, it is not held")
        held.remove(key)

    def victim(self, blocked: Container[int]) -> int | None:
        best: tuple[float, float, int] | None = None
        for layer in range(self._layers):
            found = self._coldest(layer, blocked)
            if found is None:
                continue
            score, negative = found
            distance = (layer - self._layer - 1) % self._layers + 1
            candidate = (score * self._worth[distance], -float(distance), negative)
            if best is None or candidate < best:
                best = candidate
        return None if best is None else -best[2]

    def routed(self, layer: int, ids: IdArray) -> None:
        if self._experts:
            self._layer = layer % self._layers

    def advance(self, steps: int = 1) -> None:
        self._now += steps
        self._age += steps / self._half_life
        if self._age >= _RESCALE_BITS:
            self._rescale()

    def __len__(self) -> int:
        return sum(map(len, self._held))

    def order(self) -> list[int]:
        ranked = []
        for layer, held in enumerate(self._held):
            distance = (layer - self._layer - 1) % self._layers + 1
            worth = self._worth[distance]
            ranked += [(self._scores[key] * worth, -float(distance), -key) for key in held]
        return [-negative for _, _, negative in sorted(ranked, reverse=True)]

    def _coldest(self, layer: int, blocked: Container[int]) -> tuple[float, int] | None:
        heap, held = self._heaps[layer], self._held[layer]
        skipped: list[tuple[float, int]] = []
        found: tuple[float, int] | None = None
        while heap:
            score, key = heap[0][0], -heap[0][1]
            if key not in held or score != self._scores[key]:
                heapq.heappop(heap)
            elif key in blocked:
                skipped.append(heapq.heappop(heap))
            else:
                found = heap[0]
                break
        for entry in skipped:
            heapq.heappush(heap, entry)
        return found

    def _layer_of(self, key: int) -> int:
        return key // self._experts % self._layers if self._experts else 0

    def _unit(self) -> float:
        return float(2.0**self._age)

    def _count(self, key: int, weight: float) -> None:
        if weight > 0.0 and self._used.get(key) != self._now:
            self._used[key] = self._now
            self._set(key, self._scores[key] + self._unit())

    def _set(self, key: int, score: float) -> None:
        self._scores[key] = score
        layer = self._layer_of(key)
        heap = self._heaps[layer]
        heapq.heappush(heap, (score, -key))
        if len(heap) > 4 * self._sizes[layer] + 64:
            self._rebuild(layer)

    def _rescale(self) -> None:
        periods = int(self._age // _RESCALE_BITS)
        self._age -= periods * _RESCALE_BITS
        scaled = ((key, math.ldexp(score, -periods * _RESCALE_BITS)) for key, score in self._scores.items())
        held = set().union(*self._held)
        self._scores = {key: score for key, score in scaled if score > 0.0 or key in held}
        for layer in range(self._layers):
            self._rebuild(layer)

    def _rebuild(self, layer: int) -> None:
        heap = [(self._scores[key], -key) for key in self._held[layer]]
        heapq.heapify(heap)
        self._heaps[layer], self._sizes[layer] = heap, len(heap)
