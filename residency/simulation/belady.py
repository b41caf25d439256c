"""The bound: what a policy could do that knew all routing to come."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ziggurat.residency.passes import IntArray
from ziggurat.residency.simulation.events import Events
from ziggurat.residency.simulation.pools import Keys

NEVER = 1 << 60


def next_uses(events: Events) -> IntArray:
    """For each entry of `events.experts`: the number of the next event that is routed to the same row, or NEVER."""
    counts = np.diff(events.bounds)
    event_of = np.repeat(np.arange(events.count, dtype=np.int64), counts)
    keys = event_of % events.layers * events.experts_per_layer + events.experts
    order = np.argsort(keys, kind="stable")  # by key, and within a key by event
    following = np.full(len(keys), NEVER, dtype=np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    following[order[:-1][same]] = event_of[order[1:][same]]
    return following


@dataclass(slots=True)
class _Room:
    capacity: int
    uses: dict[int, int]  # resident key -> its next event
    heap: list[tuple[int, int]]  # (-next event, key), lazy


class BeladyPool:
    """Evicts the row whose next use is farthest (Belady, 1966), with events as units: the set of an event is resident
    as a whole, so nothing of it may leave during it. That is optimal by the same exchange of rows as for single uses:
    of two rows that may leave, keeping the one that is used sooner never costs more.

    An event that does not fit passes through in rounds; afterwards the rows that are used soonest stay.

    rooms: capacity of each layer's own pool, or of one pool for all layers.
    """

    def __init__(self, events: Events, rooms: list[int]) -> None:
        self.fetched = 0
        self.evictions = 0
        self._following = next_uses(events).tolist()
        self._bounds = events.bounds.tolist()
        self._event = 0
        self._rooms = [_Room(capacity, {}, []) for capacity in rooms]

    @property
    def used(self) -> int:
        return sum(len(room.uses) for room in self._rooms)

    @property
    def capacity(self) -> int:
        return sum(room.capacity for room in self._rooms)

    def event(self, layer: int, keys: Keys, weights: Keys, ids: IntArray | None) -> list[int]:
        room = self._rooms[layer if len(self._rooms) > 1 else 0]
        first, last = self._bounds[self._event], self._bounds[self._event + 1]
        self._event += 1
        uses, heap = room.uses, room.heap
        absent = []
        for position, (key, following) in enumerate(zip(keys, self._following[first:last], strict=True)):
            if key not in uses:
                absent.append(position)
            uses[key] = following
            heapq.heappush(heap, (-following, key))
        self.fetched += len(absent)
        if len(uses) > room.capacity:
            self._evict(room, set(keys) if len(keys) <= room.capacity else set())
        if len(heap) > 8 * room.capacity + 1024:
            room.heap = [(-following, key) for key, following in uses.items()]
            heapq.heapify(room.heap)
        return absent

    def end_step(self) -> None:
        """Knowing the future needs no clock."""

    def _evict(self, room: _Room, blocked: set[int]) -> None:
        skipped = []
        while len(room.uses) > room.capacity:
            entry = heapq.heappop(room.heap)
            negative, key = entry
            if room.uses.get(key) != -negative:
                continue
            if key in blocked:
                skipped.append(entry)
                continue
            del room.uses[key]
            self.evictions += 1
        for entry in skipped:
            heapq.heappush(room.heap, entry)
