"""The rules of `ziggurat.kernels.admission` on the CPU, one at a time: what the CUDA kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.kernels.admission import (
    ABSENT,
    CANDIDATES,
    CLOCK,
    COPIES,
    HAND,
    HEAT_MOST,
    HEAT_UNIT,
    LOG_HEAD,
    WITHHELD,
    Admission,
    decayed,
)

__all__ = ["admit", "copy_rows"]

_WORD: Final = 1 << 32

Words = npt.NDArray[np.int32]


def admit(
    admission: Admission, layer: int, topk_ids: torch.Tensor, live: torch.Tensor, prefill: torch.Tensor | None
) -> None:
    """Make the experts of layer number `layer` resident that live pairs are routed to, but for their rows' bytes.

    topk_ids: integers [T, k]. live: int32 [1]. prefill: uint8 [at least T], or None for no prompt. All tensors are
    on the CPU. Changes every tensor of the admission but places, arena and pool; `copy_rows` brings the rows.
    """
    given = _Tensors.of(admission)
    given.state[COPIES] = 0
    tokens = int(live[0])
    if tokens == 0:
        return
    if layer == admission.first:
        given.state[CLOCK] = _signed(int(given.state[CLOCK]) + 1)
    clock = int(given.state[CLOCK])
    first_key = layer * admission.experts
    weights = _routed(topk_ids[:tokens], prefill, admission.experts)
    for expert, weight in weights.items():
        if weight > 0:
            key = first_key + expert
            given.heat[key] = min(given.heat_now(key, clock) + weight * HEAT_UNIT, HEAT_MOST)
            given.last[key] = clock
    used = frozenset(first_key + expert for expert in weights)
    for key in sorted(used):
        if given.table[key] >= 0:
            continue
        slot = _victim(given, clock, used) if given.places[key] >= 0 else None
        if slot is None:
            given.note(clock, key, ABSENT, ABSENT)
            continue
        evicted = int(given.owners[slot])
        if evicted >= 0:
            given.table[evicted] = ABSENT
        given.owners[slot] = key
        given.table[key] = slot
        given.copies[given.state[COPIES]] = given.places[key], slot
        given.state[COPIES] += 1
        given.note(clock, key, slot, evicted)


def copy_rows(admission: Admission) -> None:
    """Copy the rows of the layer that was admitted last, arena -> pool. On the CPU."""
    for place, slot in admission.copies[: int(admission.state[COPIES])].tolist():
        admission.pool[slot] = admission.arena[place]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """An admission's tensors as arrays over the same memory; `table` flat."""

    table: Words
    owners: Words
    heat: Words
    last: Words
    places: Words
    copies: Words
    state: Words
    log: Words

    @classmethod
    def of(cls, a: Admission) -> _Tensors:
        flat = a.table.view(-1)
        return cls(*(t.numpy() for t in (flat, a.owners, a.heat, a.last, a.places, a.copies, a.state, a.log)))

    def heat_now(self, key: int, clock: int) -> int:
        return decayed(int(self.heat[key]), (clock - int(self.last[key])) % _WORD)

    def note(self, *event: int) -> None:
        head = int(self.state[LOG_HEAD])
        self.log[head % len(self.log)] = event
        self.state[LOG_HEAD] = _signed(head + 1)


def _routed(ids: torch.Tensor, prefill: torch.Tensor | None, experts: int) -> dict[int, int]:
    """Every expert that these tokens are routed to, and how many of its pairs are not prefill."""
    weights: dict[int, int] = {}
    for token, chosen in enumerate(ids.tolist()):
        counts = prefill is None or not prefill[token]
        for expert in chosen:
            if 0 <= expert < experts:
                weights[expert] = weights.get(expert, 0) + int(counts)
    return weights


def _victim(given: _Tensors, clock: int, used: frozenset[int]) -> int | None:
    """The slot for one more row; None if all that were looked at are in use. Moves the hand."""
    for look in _looks(given):
        free = [slot for slot in look if given.owners[slot] == ABSENT]
        if free:
            return free[0]
        owners = {slot: int(given.owners[slot]) for slot in look}
        candidates = [slot for slot, key in owners.items() if key != WITHHELD and key not in used]
        if candidates:
            return min(
                candidates, key=lambda slot: given.heat_now(owners[slot], clock)
            )  # the first of equals
    return None


def _looks(given: _Tensors) -> Iterator[list[int]]:
    slots = len(given.owners)
    for _ in range(-(-slots // CANDIDATES) + 1):
        hand = int(given.state[HAND])
        given.state[HAND] = (hand + CANDIDATES) % slots
        yield [(hand + i) % slots for i in range(min(CANDIDATES, slots))]


def _signed(word: int) -> int:
    """A number modulo 2^32 as int32 holds it."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
