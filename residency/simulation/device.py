"""The twin of the device's own policy: the rules of `ziggurat.kernels.admission`, one number at a time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ziggurat.kernels import admission as rules
from ziggurat.residency.passes import IntArray
from ziggurat.residency.simulation.pools import Keys


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """The constants of the rules; the defaults are what kernels use."""

    candidates: int = rules.CANDIDATES
    half_life: int = rules.HALF_LIFE
    presence: bool = False  # count a use once a pass instead of once a pair; no kernel does
    distance: bool = False  # halve heat over the layers that run before the owner's own; no kernel does

    def worth(self, heat: int, distance: int, layers: int) -> int:
        """Decayed heat of a row whose layer runs `distance` layers later, 1 to `layers`."""
        return heat - ((heat >> 1) * distance) // layers if self.distance else heat

    def decayed(self, heat: int, age: int) -> int:
        """As `rules.decayed`, for any half-life."""
        halvings, rest = divmod(age, self.half_life)
        value = heat >> halvings if halvings <= 31 else 0
        return value - (((value >> 1) * rest) // self.half_life)


class DevicePool:
    """Slots, owners, heat and hand of one pool, all rows being in the arena. `events` are those of the device's log:
    (clock, key, slot, evicted key or -1)."""

    def __init__(self, layers: int, experts: int, slots: int, settings: DeviceSettings | None = None) -> None:
        self.fetched = 0
        self.evictions = 0
        self.unserved = 0  # rows for which no slot could be had: all were in use by the layer itself
        self.capacity = slots
        self.owners = [rules.ABSENT] * slots
        self.heat = [0] * (layers * experts)
        self.last = [0] * (layers * experts)
        self.clock = 0
        self.hand = 0
        self.log: list[tuple[int, int, int, int]] = []
        self._settings = settings or DeviceSettings()
        self._layers, self._experts = layers, experts
        self._slot_of: dict[int, int] = {}
        self._window = min(self._settings.candidates, slots)
        self._looks = -(-slots // self._settings.candidates) + 1

    @property
    def used(self) -> int:
        return len(self._slot_of)

    def event(self, layer: int, keys: Keys, weights: Keys, ids: IntArray | None) -> list[int]:
        if layer == 0 and keys:
            self.clock += 1
        heat, last, clock, settings = self.heat, self.last, self.clock, self._settings
        absent = []
        for position, key in enumerate(keys):
            weight = weights[position]
            if weight > 0:
                if settings.presence:
                    weight = 1
                so_far = settings.decayed(heat[key], clock - last[key])
                heat[key] = min(so_far + weight * rules.HEAT_UNIT, rules.HEAT_MOST)
                last[key] = clock
            if key not in self._slot_of:
                absent.append(position)
        routed = set(keys)
        for position in absent:
            self._admit(layer, keys[position], routed)
        return absent

    def end_step(self) -> None:
        """The clock moves when the next step begins."""

    def _admit(self, layer: int, key: int, routed: set[int]) -> None:
        slot = self._look_for_slot(layer, routed)
        if slot is None:
            self.unserved += 1
            self.log.append((self.clock, key, rules.ABSENT, rules.ABSENT))
            return
        evicted = self.owners[slot]
        if evicted != rules.ABSENT:
            del self._slot_of[evicted]
            self.evictions += 1
        self.owners[slot] = key
        self._slot_of[key] = slot
        self.fetched += 1
        self.log.append((self.clock, key, slot, evicted))

    def _look_for_slot(self, layer: int, routed: set[int]) -> int | None:
        owners, heat, last, clock = self.owners, self.heat, self.last, self.clock
        settings, capacity = self._settings, self.capacity
        half_life, distances = settings.half_life, settings.distance
        for _ in range(self._looks):
            start, self.hand = self.hand, (self.hand + settings.candidates) % capacity
            found, least = -1, 0
            for slot in itertools.chain(
                range(start, min(capacity, start + self._window)), range(start + self._window - capacity)
            ):
                owner = owners[slot]
                if owner == rules.ABSENT:
                    return slot
                if owner in routed:
                    continue
                # `decayed`, spelled out: this is the innermost loop of a simulation.
                halvings, rest = divmod(clock - last[owner], half_life)
                warmth = heat[owner] >> halvings
                warmth -= ((warmth >> 1) * rest) // half_life
                if distances:
                    distance = (owner // self._experts - layer - 1) % self._layers + 1
                    warmth = settings.worth(warmth, distance, self._layers)
                if found < 0 or warmth < least:
                    found, least = slot, warmth
            if found >= 0:
                return found
        return None
