"""Agreement between tensor-parallel ranks: the only way in which one rank's luck may steer a step."""

from __future__ import annotations

from typing import Any, Protocol


class Consensus(Protocol):
    """Collectives on small host values. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, value: int) -> int:
        """Sum of `value` over the ranks."""
        ...

    def gather(self, item: Any) -> list[Any]:
        """`item` (picklable) of every rank, in rank order."""
        ...


class LocalConsensus:
    """A single rank agrees with itself."""

    rank = 0
    size = 1

    def sum(self, value: int) -> int:
        return value

    def gather(self, item: Any) -> list[Any]:
        return [item]


class NoConsensus:
    """A rank that decides alone although it has peers: the negative control that must go wrong."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum(self, value: int) -> int:
        return value

    def gather(self, item: Any) -> list[Any]:
        return [item]
