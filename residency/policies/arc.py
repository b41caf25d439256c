"""ARC: recency and frequency in a balance that misses adjust."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy, first_allowed


class ArcPolicy(ColdFirstPolicy):
    """Keys used once and keys used more often are two LRU lists; for each there is a list of keys that left it, without
    their rows. A key that comes back from the first such list moves the target size of the once-used list up, one
    from the second moves it down. (Megiddo and Modha, FAST 2003.)

    A pool asks for victims before it says what comes in, so a return adjusts the victims after it, not its own.
    """

    name = "arc"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._once: OrderedDict[int, None] = OrderedDict()  # all four: least recent first
        self._often: OrderedDict[int, None] = OrderedDict()
        self._left_once: OrderedDict[int, None] = OrderedDict()
        self._left_often: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0  # of the once-used list

    def _admit(self, key: int) -> None:
        once, often = len(self._left_once), len(self._left_often)
        if key in self._left_once:
            self._target = min(float(self.capacity), self._target + max(1.0, often / once))
            del self._left_once[key]
            self._often[key] = None
        elif key in self._left_often:
            self._target = max(0.0, self._target - max(1.0, once / often))
            del self._left_often[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def _use(self, key: int) -> None:
        if key in self._often:
            self._often.move_to_end(key)
        else:
            del self._once[key]
            self._often[key] = None

    def _drop(self, key: int) -> None:
        if key in self._once:
            del self._once[key]
            self._left_once[key] = None
            # The two once-used lists together hold as many keys as there is room for, all four twice as many.
            while self._left_once and len(self._once) + len(self._left_once) > self.capacity:
                self._left_once.popitem(last=False)
        else:
            del self._often[key]
            self._left_often[key] = None
        while self._left_often and self._remembered() > 2 * self.capacity:
            self._left_often.popitem(last=False)

    def _remembered(self) -> int:
        return len(self._once) + len(self._often) + len(self._left_once) + len(self._left_often)

    def _choose(self, blocked: Container[int]) -> int | None:
        lists = (self._once, self._often)
        if not self._once or len(self._once) <= self._target:
            lists = (self._often, self._once)
        found = first_allowed(lists[0], blocked)
        return first_allowed(lists[1], blocked) if found is None else found
