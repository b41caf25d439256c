"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import IdArray, PolicySettings
from ziggurat.residency.runtime_errors import PolicyError


class LruPolicy:
    """Evicts the key whose last use is longest ago. Every operation is O(1); `victim` skips blocked keys."""

    name = "lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        del settings  # recency needs no parameter
        self._keys: OrderedDict[int, None] = OrderedDict()  # coldest first

    def insert(self, key: int, weight: float = 1.0) -> None:
        if key in self._keys:
            raise PolicyError(f"lru: key {key} is inserted already; remove it first")
        self._keys[key] = None
        if weight <= 0.0:
            self._keys.move_to_end(key, last=False)

    def seed(self, key: int, heat: float) -> None:
        self.insert(key, 0.0)  # hottest first at the cold end leaves the coldest as the next victim

    def touch(self, key: int, weight: float = 1.0) -> None:
        if key not in self._keys:
            raise PolicyError(f"lru: key {key} was touched but is not held; insert it first")
        if weight > 0.0:
            self._keys.move_to_end(key)

    def remove(self, key: int) -> None:
        if key not in self._keys:
            raise PolicyError(f"lru: key {key} cannot be removed, it is not held")
        del self._keys[key]

    def victim(self, blocked: Container[int]) -> int | None:
        return next((key for key in self._keys if key not in blocked), None)

    def routed(self, layer: int, ids: IdArray) -> None:
        """Keys alone decide: nothing to do."""

    def advance(self, steps: int = 1) -> None:
        """Recency is an order, not an age: nothing to do."""

    def __len__(self) -> int:
        return len(self._keys)

    def order(self) -> list[int]:
        return list(reversed(self._keys))
