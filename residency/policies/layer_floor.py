"""Layers that share room, each with a floor that the others leave it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container

from ziggurat.residency.policies.base import EvictionPolicy, IdArray, PolicySettings
from ziggurat.residency.runtime_errors import PolicyError

_HALF_LIFE = 256.0  # steps, of a layer's demand
_RESCALE_HALF_LIVES = 256.0


class LayerFloorPolicy:
    """A policy of its own for each layer, and a rule for whose row leaves: of the layers that hold more than their
    floor, the one whose rows were wanted least lately for each row that it holds.

    So room goes where it is asked for, and a layer that is asked for little keeps `floor` (0 to 1) of an equal part.
    With 1 all layers have the same room. If no layer is above its floor, the largest one gives.

    A victim costs one look at each layer, and what the layer's own policy takes.
    """

    def __init__(
        self, make: Callable[[PolicySettings], EvictionPolicy], settings: PolicySettings, floor: float
    ) -> None:
        if not 0.0 <= floor <= 1.0:
            raise PolicyError(f"a layer's floor is {floor} of an equal part; it must be 0 to 1")
        if settings.experts < 1:
            raise PolicyError("layers cannot be told apart without the number of their experts")
        self._experts = settings.experts
        self._layers = [make(PolicySettings(settings.half_life)) for _ in range(settings.layers)]
        self.name = f"{self._layers[0].name} by layer"
        self.floor = floor
        self._held = 0
        self._capacity = 0  # the largest number of keys ever held: room is short only when it is full
        self._demand = [0.0] * settings.layers  # decayed uses, in units of the base step
        self._age = 0.0  # half-lives since the base step

    def insert(self, key: int, weight: float = 1.0) -> None:
        self._of(key).insert(key, weight)
        self._came(key, weight)

    def seed(self, key: int, heat: float) -> None:
        self._of(key).seed(key, heat)
        self._came(key, 0.0)

    def touch(self, key: int, weight: float = 1.0) -> None:
        self._of(key).touch(key, weight)
        self._want(key, weight)

    def remove(self, key: int) -> None:
        self._of(key).remove(key)
        self._held -= 1

    def victim(self, blocked: Container[int]) -> int | None:
        rows = self._capacity * self.floor / len(self._layers)
        sizes = [len(one) for one in self._layers]
        above = [layer for layer, size in enumerate(sizes) if size > rows]
        ranked = sorted(above, key=lambda layer: (self._demand[layer] / sizes[layer], layer))
        others = [layer for layer, size in enumerate(sizes) if 0 < size <= rows]
        for layer in [*ranked, *sorted(others, key=lambda layer: (-sizes[layer], layer))]:
            found = self._layers[layer].victim(blocked)
            if found is not None:
                return found
        return None

    def routed(self, layer: int, ids: IdArray) -> None:
        """The layers' policies look at one key at a time."""

    def advance(self, steps: int = 1) -> None:
        for one in self._layers:
            one.advance(steps)
        self._age += steps / _HALF_LIFE
        if self._age >= _RESCALE_HALF_LIVES:
            self._demand = [wanted * 2.0**-self._age for wanted in self._demand]
            self._age = 0.0

    def __len__(self) -> int:
        return self._held

    def order(self) -> list[int]:
        clone = copy.deepcopy(self)
        leaving = []
        while (key := clone.victim(())) is not None:
            clone.remove(key)
            leaving.append(key)
        return leaving[::-1]

    def _of(self, key: int) -> EvictionPolicy:
        return self._layers[key // self._experts % len(self._layers)]

    def _came(self, key: int, weight: float) -> None:
        self._held += 1
        self._capacity = max(self._capacity, self._held)
        self._want(key, weight)

    def _want(self, key: int, weight: float) -> None:
        if weight > 0.0:
            self._demand[key // self._experts % len(self._layers)] += float(2.0**self._age)
