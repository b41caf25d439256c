"""CLOCK: first in, first out, with a second chance for what was used in the meantime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy


class ClockPolicy(ColdFirstPolicy):
    """A hand goes round the keys: one that was used since the last round is passed and its mark taken away, the first
    one without a mark leaves. New keys come in behind the hand without a mark. (Corbato, 1968.)

    The ring is kept as a queue whose front is the hand.
    """

    name = "clock"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._ring: OrderedDict[int, bool] = OrderedDict()

    def _admit(self, key: int) -> None:
        self._ring[key] = False

    def _use(self, key: int) -> None:
        self._ring[key] = True

    def _drop(self, key: int) -> None:
        del self._ring[key]

    def _choose(self, blocked: Container[int]) -> int | None:
        ring = self._ring
        for _ in range(2 * len(ring)):
            key = next(iter(ring))
            if key not in blocked:
                if not ring[key]:
                    return key
                ring[key] = False
            ring.move_to_end(key)
        return None
