"""The model of the device's admission against the rules written once more, one number at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ziggurat.kernels.admission import HEAT_MOST, HEAT_UNIT
from ziggurat.residency.admission_model import AdmissionModel, AdmissionRules


@dataclass
class Scalar:
    """The rules of `ziggurat.kernels.admission`, in plain numbers."""

    experts: int
    slots: int
    rules: AdmissionRules
    clock: int = 0
    hand: int = 0
    owners: dict[int, int] = field(default_factory=dict)
    heat: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def now(self, key: int) -> int:
        age = self.clock - self.last.get(key, 0)
        halves, rest = age // self.rules.half_life, age % self.rules.half_life
        value = self.heat.get(key, 0) >> halves if halves <= 31 else 0
        return value - ((value >> 1) * rest) // self.rules.half_life

    def admit(self, layer: int, pairs: dict[int, int]) -> list[int]:
        self.clock += layer == 0
        used = {layer * self.experts + expert: weight for expert, weight in pairs.items()}
        for key, weight in used.items():
            if weight > 0:
                self.heat[key] = min(self.now(key) + weight * HEAT_UNIT, HEAT_MOST)
                self.last[key] = self.clock
        missing = sorted(set(used) - set(self.owners.values()))
        for key in missing:
            slot = self.victim(set(used))
            if slot is not None:
                self.owners[slot] = key
        return missing

    def victim(self, used: set[int]) -> int | None:
        for _ in range(-(-self.slots // self.rules.candidates) + 1):
            look = [(self.hand + i) % self.slots for i in range(min(self.rules.candidates, self.slots))]
            self.hand = (self.hand + self.rules.candidates) % self.slots
            free = [slot for slot in look if slot not in self.owners]
            if free:
                return free[0]
            others = [slot for slot in look if self.owners[slot] not in used]
            if others:
                return min(others, key=lambda slot: self.now(self.owners[slot]))
        return None


@pytest.mark.parametrize("slots", [3, 7, 20, 40, 48])
@pytest.mark.parametrize("rules", [AdmissionRules(), AdmissionRules(5, 3), AdmissionRules(8, 64)])
def test_it_misses_what_the_rules_miss(slots: int, rules: AdmissionRules) -> None:
    random = np.random.default_rng(slots)
    model, scalar = AdmissionModel(3, 16, slots, rules), Scalar(16, slots, rules)
    missed = 0
    for step in range(60):
        for layer in range(3):
            weight = np.exp(-np.arange(16) / 3 - (step // 20) * (np.arange(16) % 3))
            chosen = np.sort(random.choice(16, 5, replace=False, p=weight / weight.sum()))
            pairs = random.integers(0, 4, 5)  # 0: only tokens of a prompt want it
            found = model.admit(layer, chosen, pairs).tolist()
            assert found == scalar.admit(layer, dict(zip(chosen.tolist(), pairs.tolist(), strict=True)))
            missed += len(found)
    assert missed > 40


def test_heat_neither_overflows_nor_lives_for_ever() -> None:
    model, scalar = AdmissionModel(1, 4, 2), Scalar(4, 2, AdmissionRules())
    for step in range(40):
        for chosen in ([0], [1], [2 + step % 2]):
            experts, pairs = np.array(chosen), np.array([HEAT_MOST // HEAT_UNIT])
            assert model.admit(0, experts, pairs).tolist() == scalar.admit(0, {chosen[0]: int(pairs[0])})
    model._clock = scalar.clock = 40 * 256 + 40
    for expert in (3, 2, 1):
        assert model.admit(0, np.array([expert]), np.array([0])).tolist() == scalar.admit(0, {expert: 0})


def test_a_seeded_row_is_no_miss_and_leaves_before_one_that_was_used() -> None:
    model = AdmissionModel(1, 8, 3)
    model.seed([4, 5, 6])
    one = np.array([1])
    assert model.admit(0, np.array([4]), one).tolist() == []
    assert model.admit(0, np.array([0]), one).tolist() == [0]
    assert model.admit(0, np.array([4]), one).tolist() == []
    assert model.admit(0, np.array([5]), one).tolist() == [5]


def test_prompts_alone_keep_no_row() -> None:
    """A long prompt recycles its own rows: those of decode steps stay."""
    model = AdmissionModel(1, 16, 8)
    decode = np.arange(4)
    model.admit(0, decode, np.full(4, 1))
    for first in range(4, 16, 4):
        model.admit(0, np.arange(first, first + 4), np.zeros(4, dtype=np.int64))
    assert model.admit(0, decode, np.full(4, 1)).tolist() == []
