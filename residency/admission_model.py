"""What the device's rules of admission would do with given routing, row by row on the host: for plans and studies.

The rules are those of `ziggurat.kernels.admission`, over an arena that holds every row. No row is copied, only the
books are kept. The arithmetic is that of the kernels, integer by integer, so their misses are these misses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.admission import CANDIDATES, HALF_LIFE, HEAT_MOST, HEAT_UNIT

IntArray = npt.NDArray[np.int64]
_FREE = -1
_SHIFT_MOST = 31


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The constants of the rules, to be varied in studies; the defaults are what the kernels are built with."""

    candidates: int = CANDIDATES
    half_life: int = HALF_LIFE


class AdmissionModel:
    """Slot table, owners and heat of one pool, empty at first.

    layers, experts: of the model. slots: of the pool, at least 1. A row that finds no victim stays out, as if the
    arena did not have it.
    """

    name = "device"

    def __init__(self, layers: int, experts: int, slots: int, rules: AdmissionRules | None = None) -> None:
        keys = layers * experts
        self._rules = rules or AdmissionRules()
        self._experts = experts
        self._slots = slots
        self._table = np.full(keys, _FREE, dtype=np.int64)
        # An owner of -1 reads and marks the last element of what is indexed by key; it belongs to nobody.
        self._owners = np.full(slots, _FREE, dtype=np.int64)
        self._heat = np.zeros(keys + 1, dtype=np.int64)
        self._last = np.zeros(keys + 1, dtype=np.int64)
        self._routed = np.zeros(keys + 1, dtype=np.bool_)
        self._clock = 0
        self._hand = 0
        self._window = np.arange(min(self._rules.candidates, slots))

    def seed(self, keys: Iterable[int], uses: npt.NDArray[np.floating] | None = None) -> None:
        """Put rows into the first slots, at most as many as there are, as a warm start does.

        uses: float [layers * experts], pairs that each row was routed to lately, from which heat starts.
        """
        for slot, key in enumerate(keys):
            self._owners[slot] = key
            self._table[key] = slot
        if uses is not None:
            self._heat[:-1] = np.minimum(uses * HEAT_UNIT, HEAT_MOST).astype(np.int64)
            self._last[:] = self._clock

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self._experts

    def resident(self, layer: int) -> IntArray:
        """The experts of a layer that have a slot, ascending."""
        row = self._table[layer * self._experts : (layer + 1) * self._experts]
        return np.flatnonzero(row != _FREE)

    def admit(self, layer: int, experts: IntArray, steady: IntArray) -> IntArray:
        """One layer of a pass: `experts` [n] that live pairs are routed to, ascending, and their pairs [n] of tokens
        that are not prefill. Returns the keys that had no slot, ascending; those that found one have it now."""
        if layer == 0:
            self._clock += 1
        keys = experts + layer * self._experts
        self._warm(keys[steady > 0], steady[steady > 0])
        missing: IntArray = keys[self._table[keys] == _FREE]
        if len(missing):
            self._routed[keys] = True
            for key in missing.tolist():
                slot = self._victim()
                if slot is not None:
                    self._take(slot, key)
            self._routed[keys] = False
        return missing

    def _warm(self, keys: IntArray, steady: IntArray) -> None:
        heat = self._decayed(keys) + steady * HEAT_UNIT
        self._heat[keys] = np.minimum(heat, HEAT_MOST)
        self._last[keys] = self._clock

    def _decayed(self, keys: IntArray) -> IntArray:
        halves, rest = np.divmod(self._clock - self._last[keys], self._rules.half_life)
        value = np.where(halves > _SHIFT_MOST, 0, self._heat[keys] >> np.minimum(halves, _SHIFT_MOST))
        found: IntArray = value - ((value >> 1) * rest) // self._rules.half_life
        return found

    def _victim(self) -> int | None:
        """The slot that the rules choose, or None if all looks find only slots that this layer uses."""
        for _ in range(-(-self._slots // self._rules.candidates) + 1):
            slots = (self._hand + self._window) % self._slots
            self._hand = (self._hand + self._rules.candidates) % self._slots
            owners = self._owners[slots]
            free = np.flatnonzero(owners == _FREE)
            if len(free):
                return int(slots[free[0]])
            heat = self._decayed(owners)
            heat[self._routed[owners]] = HEAT_MOST + 1
            first = int(heat.argmin())
            if heat[first] <= HEAT_MOST:
                return int(slots[first])
        return None

    def _take(self, slot: int, key: int) -> None:
        evicted = self._owners[slot]
        if evicted != _FREE:
            self._table[evicted] = _FREE
        self._owners[slot] = key
        self._table[key] = slot
