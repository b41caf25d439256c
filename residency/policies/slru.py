"""Segmented LRU: keys that were used twice are protected from keys that were used once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy, first_allowed

PROTECTED_PERCENT = 80


class SlruPolicy(ColdFirstPolicy):
    """New keys are on probation; a use there protects them. The protected segment takes 80 % of the capacity; its
    least recently used key goes back to probation. Victims come from probation first. (Karedla et al., 1994.)
    """

    name = "slru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._probation: OrderedDict[int, None] = OrderedDict()  # both: least recently used first
        self._protected: OrderedDict[int, None] = OrderedDict()

    def _admit(self, key: int) -> None:
        self._probation[key] = None

    def _use(self, key: int) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        if len(self._protected) * 100 > self.capacity * PROTECTED_PERCENT:
            demoted, _ = self._protected.popitem(last=False)
            self._probation[demoted] = None

    def _drop(self, key: int) -> None:
        if key in self._probation:
            del self._probation[key]
        else:
            del self._protected[key]

    def _choose(self, blocked: Container[int]) -> int | None:
        found = first_allowed(self._probation, blocked)
        return first_allowed(self._protected, blocked) if found is None else found
