"""W-TinyLFU: a small window in front of a segmented LRU that only what is more frequent may enter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy, first_allowed
from ziggurat.residency.policies.slru import PROTECTED_PERCENT

WINDOW_PERCENT = 1
SAMPLES_PER_KEY = 10


class WTinyLfuPolicy(ColdFirstPolicy):
    """New keys enter a window, an LRU of a hundredth of the capacity. What falls out of it competes with the least
    recent key on probation in the main part: the less frequent one leaves, of equal ones the newcomer. Counts cover
    keys that are not held, too, and are halved after ten uses per key of the capacity. (Einziger et al., 2017.)

    Counts are exact: a model has few enough experts that the sketch of the original is not needed.
    """

    name = "w-tinylfu"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._window: OrderedDict[int, None] = OrderedDict()  # all three: least recently used first
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._sampled = 0

    def _admit(self, key: int) -> None:
        self._count(key)
        self._window[key] = None

    def _use(self, key: int) -> None:
        self._count(key)
        if key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._window:
            self._window.move_to_end(key)
        else:
            del self._probation[key]
            self._protected[key] = None
            room = self.capacity - self._window_size()
            if len(self._protected) * 100 > max(1, room) * PROTECTED_PERCENT:
                demoted, _ = self._protected.popitem(last=False)
                self._probation[demoted] = None

    def _drop(self, key: int) -> None:
        for part in (self._window, self._probation, self._protected):
            if key in part:
                del part[key]
                return

    def _choose(self, blocked: Container[int]) -> int | None:
        while len(self._window) >= self._window_size():  # what comes in needs a place there
            newcomer = first_allowed(self._window, blocked)
            if newcomer is None:
                break
            rival = first_allowed(self._probation, blocked)
            room = len(self._probation) + len(self._protected) < self.capacity - self._window_size()
            # While the main part has room, or nobody on probation could leave, the newcomer need not compete.
            if not room and rival is not None and self._uses.get(newcomer, 0) <= self._uses.get(rival, 0):
                return newcomer
            del self._window[newcomer]
            self._probation[newcomer] = None
        for part in (self._probation, self._protected, self._window):
            found = first_allowed(part, blocked)
            if found is not None:
                return found
        return None

    def _window_size(self) -> int:
        return max(1, self.capacity * WINDOW_PERCENT // 100)

    def _count(self, key: int) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1
        self._sampled += 1
        if self._sampled >= SAMPLES_PER_KEY * max(1, self.capacity):
            self._sampled //= 2
            self._uses = {one: uses // 2 for one, uses in self._uses.items() if uses > 1}
