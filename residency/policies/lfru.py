"""LFRU: recency decides who is privileged, frequency decides who of the others leaves."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy

PRIVILEGED_PERCENT = 50


class LfruPolicy(ColdFirstPolicy):
    """The privileged half of the capacity is an LRU of keys that were used while held; the least recent of it falls
    back to the other half, whose least frequently used key is the victim. (Bilal and Kang, 2017.) Counts start anew
    when a key leaves; of equal ones the key that joined the half first leaves.
    """

    name = "lfru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._privileged: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._uses: dict[int, int] = {}
        self._joined: dict[int, int] = {}  # of the other half: when it joined
        self._heap: list[tuple[int, int, int]] = []  # (uses, joined, key), lazy
        self._clock = 0

    def _admit(self, key: int) -> None:
        self._uses[key] = 1
        self._join(key)

    def _use(self, key: int) -> None:
        self._uses[key] += 1
        if key in self._privileged:
            self._privileged.move_to_end(key)
            return
        del self._joined[key]
        self._privileged[key] = None
        if len(self._privileged) * 100 > max(1, self.capacity) * PRIVILEGED_PERCENT:
            fallen, _ = self._privileged.popitem(last=False)
            self._join(fallen)

    def _drop(self, key: int) -> None:
        del self._uses[key]
        if self._joined.pop(key, None) is None:
            del self._privileged[key]

    def _choose(self, blocked: Container[int]) -> int | None:
        skipped: list[tuple[int, int, int]] = []
        found: int | None = None
        while self._heap:
            _, joined, key = self._heap[0]
            if self._joined.get(key) != joined:
                heapq.heappop(self._heap)
            elif key in blocked:
                skipped.append(heapq.heappop(self._heap))
            else:
                found = key
                break
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        if found is not None:
            return found
        return next((key for key in self._privileged if key not in blocked), None)

    def _join(self, key: int) -> None:
        self._clock += 1
        self._joined[key] = self._clock
        heapq.heappush(self._heap, (self._uses[key], self._clock, key))
        if len(self._heap) > 4 * len(self._joined) + 64:
            self._heap = [(self._uses[one], joined, one) for one, joined in self._joined.items()]
            heapq.heapify(self._heap)
