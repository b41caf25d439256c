"""SIEVE: a hand over a queue in order of arrival; survivors stay where they are."""

from __future__ import annotations

from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy

_NONE = -1


class SievePolicy(ColdFirstPolicy):
    """As CLOCK, but new keys enter at the head and not behind the hand, so that the hand sifts old keys while new ones
    are tried at the other end. (Zhang et al., NSDI 2024.) It does not withstand scans by itself; here keys that only
    a scan wanted never enter the queue.
    """

    name = "sieve"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._visited: dict[int, bool] = {}
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._head = self._tail = self._hand = _NONE

    def _admit(self, key: int) -> None:
        self._visited[key] = False
        self._newer[key], self._older[key] = _NONE, self._head
        if self._head != _NONE:
            self._newer[self._head] = key
        else:
            self._tail = key
        self._head = key

    def _use(self, key: int) -> None:
        self._visited[key] = True

    def _drop(self, key: int) -> None:
        newer, older = self._newer.pop(key), self._older.pop(key)
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._head = older
        if older != _NONE:
            self._newer[older] = newer
        else:
            self._tail = newer
        if self._hand == key:
            self._hand = newer
        del self._visited[key]

    def _choose(self, blocked: Container[int]) -> int | None:
        hand = self._hand
        for _ in range(2 * len(self._visited)):
            if hand == _NONE:
                hand = self._tail
            if hand not in blocked:
                if not self._visited[hand]:
                    self._hand = hand
                    return hand
                self._visited[hand] = False
            hand = self._newer[hand]
        return None
