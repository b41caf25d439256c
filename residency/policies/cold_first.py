"""What the classical policies share: which keys are held, and that keys nobody has used yet leave first."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Container

from ziggurat.residency.policies.base import IdArray, PolicySettings
from ziggurat.residency.runtime_errors import PolicyError


class ColdFirstPolicy(ABC):
    """Keys that only a scan wanted (weight 0), and seeds, wait at the cold end, the last one to arrive leaving first,
    until they are used; a policy's own structures hold used keys only and never see the others.

    `capacity` is the largest number of keys ever held: a pool evicts only when it is full, so that is its size.
    """

    name = ""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        del settings  # what most policies can be told is nothing that these use
        self.capacity = 0
        self._held: set[int] = set()
        self._cold: dict[int, None] = {}

    def insert(self, key: int, weight: float = 1.0) -> None:
        if key in self._held:
            raise PolicyError(f"{self.name}: key {key} is inserted already; remove it first")
        self._held.add(key)
        if len(self._held) > self.capacity:
            self.capacity = len(self._held)
        if weight > 0.0:
            self._admit(key)
        else:
            self._cold[key] = None

    def seed(self, key: int, heat: float) -> None:
        self.insert(key, 0.0)

    def touch(self, key: int, weight: float = 1.0) -> None:
        if key not in self._held:
            raise PolicyError(f"{self.name}: key {key} was touched but is not held; insert it first")
        if weight > 0.0:
            if key in self._cold:
                del self._cold[key]
                self._admit(key)
            else:
                self._use(key)

    def remove(self, key: int) -> None:
        if key not in self._held:
            raise PolicyError(f"{self.name}: key {key} cannot be removed, it is not held")
        self._held.remove(key)
        if key in self._cold:
            del self._cold[key]
        else:
            self._drop(key)

    def victim(self, blocked: Container[int]) -> int | None:
        for key in reversed(self._cold):
            if key not in blocked:
                return key
        return self._choose(blocked)

    def advance(self, steps: int = 1) -> None:
        """These policies count uses, not steps."""
        return

    def routed(self, layer: int, ids: IdArray) -> None:
        """These policies look at one key at a time."""
        return

    def __len__(self) -> int:
        return len(self._held)

    def order(self) -> list[int]:
        clone = copy.deepcopy(self)
        leaving = []
        while (key := clone.victim(())) is not None:
            clone.remove(key)
            leaving.append(key)
        return leaving[::-1]

    @abstractmethod
    def _admit(self, key: int) -> None:
        """`key` is held and has been used for the first time since it came."""

    @abstractmethod
    def _use(self, key: int) -> None:
        """A key that was admitted is used again."""

    @abstractmethod
    def _drop(self, key: int) -> None:
        """An admitted key leaves."""

    @abstractmethod
    def _choose(self, blocked: Container[int]) -> int | None:
        """Which admitted key is next. May settle books (a hand moves on), but asking again gives the same answer."""


def first_allowed(keys: dict[int, None], blocked: Container[int]) -> int | None:
    """The first key that is not blocked; None if there is none."""
    for key in keys:
        if key not in blocked:
            return key
    return None
