"""Places of an arena that never cache: rows pass through them, or wait in them to be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Quiet = Callable[[int], bool]
"""Whether no step in flight may read a place."""


class StagingPlaces:
    """Which staging places are idle, and which hold a row that was read early. Not safe for threads by itself.

    An early row is worth a read, not more: when nothing else is idle it makes room.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._idle = list(places)[::-1]
        self._early: dict[int, int] = {}  # key -> its place, the longest there first

    def idle(self, quiet: Quiet) -> int:
        """Places that may be written to at once and hold nothing."""
        return sum(quiet(place) for place in self._idle)

    def take(self, quiet: Quiet, *, give_up: bool = True) -> int | None:
        """A place to write to, an early row's if there is no other and `give_up` says so; None if there is none."""
        for i in range(len(self._idle) - 1, -1, -1):
            if quiet(self._idle[i]):
                return self._idle.pop(i)
        if give_up and self._early:
            return self._early.pop(next(iter(self._early)))
        return None

    def give(self, place: int) -> None:
        """A place that was taken is idle again."""
        self._idle.append(place)

    def keep(self, key: int, place: int) -> None:
        """The row of `key` is in a place that was taken, and waits there."""
        self._early[key] = place

    def __contains__(self, key: object) -> bool:
        return key in self._early

    def find(self, key: int) -> int:
        """The place of a row that waits. It is idle from now on, and not quiet as long as somebody reads it."""
        place = self._early.pop(key)
        self._idle.append(place)
        return place

    def clear(self) -> None:
        """No row waits any more."""
        self._idle += self._early.values()
        self._early.clear()

    def places(self) -> list[int]:
        """All that have not been taken."""
        return [*self._idle, *self._early.values()]
