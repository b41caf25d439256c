"""What a layer needs to make its own experts resident: the tensors, and the rules that kernels and their twin follow.

A layer is *admitted* before its GEMMs, on the device and without the host. In a pass with live tokens, for layer
number `layer` (key = layer * E + expert; all integer arithmetic, so every implementation gives the same bits):

1. The layer that begins a pass (`first`) advances the clock: clock += 1.
2. For every expert that live pairs are routed to, with w = its pairs of tokens that are not prefill: if w > 0,
   heat[key] = min(decayed(heat[key], clock - last[key]) + w * HEAT_UNIT, HEAT_MOST) and last[key] = clock.
3. Its experts without a slot, in ascending order. If places[key] < 0 the row is not in the arena: nothing changes, the
   event (clock, key, -1, -1) is logged, and the layer counts the expert's pairs as missing. Otherwise a victim is
   looked for among CANDIDATES slots in a row from `hand` on (all of them if the pool has fewer), modulo S:
     * never a slot whose owner is of this layer and routed to in this call (that includes those just admitted);
     * never a slot whose owner is WITHHELD (a pool that is told to use fewer slots than it has);
     * a slot without an owner first, then the one whose owner has the least decayed heat;
     * of equal ones the first from `hand` on.
   hand = (hand + CANDIDATES) mod S after each look. If a look finds none, the next ones follow, at most
   ceil(S / CANDIDATES) + 1 in all; if none of these finds one either, the row counts as not in the arena.
4. table[evicted] = -1, owners[slot] = key, table[key] = slot; (place, slot) goes to the copy list, the event
   (clock, key, slot, evicted key or -1) to the log. A row is read by GEMMs only after it has been copied.

decayed(h, age): halves every HALF_LIFE steps, in between linearly: with q = age / HALF_LIFE, f = age mod HALF_LIFE and
v = h >> q (0 if q > 31), it is v - (((v >> 1) * f) / HALF_LIFE).

The log is a ring that only the device writes: event number n is at n mod its length, a power of two, and `log_head`
says how many there have been. The host copies it in stream order and never has to be waited for.

A call without live tokens changes nothing but the number of copies, which is 0. Clock and `log_head` count modulo
2^32, in int32: a busy service makes 2^31 events within days. Differences of two of them are taken modulo 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

CANDIDATES: Final = 32
HALF_LIFE: Final = 64  # passes; longer ones keep what has gone cold (docs/admission.md)
HEAT_UNIT: Final = 1 << 12
HEAT_MOST: Final = (1 << 31) - 1
ABSENT: Final = -1
WITHHELD: Final = -2  # the owner of a slot that is never used

# Words of `state`.
CLOCK: Final = 0
HAND: Final = 1
LOG_HEAD: Final = 2
COPIES: Final = 3  # rows in the copy list of the layer that was admitted last
STATE_WORDS: Final = 8


@dataclass(frozen=True, slots=True)
class Admission:
    """The tensors of one pool, all int32 and contiguous on its device unless said otherwise.

    table [L, E]: slot of each expert or -1. owners [S]: key in each slot, -1, or -2 (WITHHELD). heat, last [L * E]:
    as above.
    places [L * E]: place of each row in the arena or -1; the host writes it in stream order, between passes.
    copies [E, 2]: (place, slot) of the layer admitted last. state [STATE_WORDS]. log [N, 4], N a power of two and at
    least L * E, which a pass can fill: events.
    arena: uint8 [places, stride], the arena as the device sees it (host memory mapped into its address space; its
    data_ptr() is an address of the device). pool: uint8 [S, stride].
    first: number of the layer that begins a pass, the lowest one that is admitted.

    Raises ValueError for tensors that do not fit each other.
    """

    table: torch.Tensor
    owners: torch.Tensor
    heat: torch.Tensor
    last: torch.Tensor
    places: torch.Tensor
    copies: torch.Tensor
    state: torch.Tensor
    log: torch.Tensor
    arena: torch.Tensor
    pool: torch.Tensor
    first: int = 0

    def __post_init__(self) -> None:
        keys, experts = self.layers * self.experts, self.experts
        wanted = {
            "owners": (self.slots,),
            "heat": (keys,),
            "last": (keys,),
            "places": (keys,),
            "copies": (experts, 2),
            "state": (STATE_WORDS,),
            "log": (self.log.shape[0], 4),
        }
        for name, shape in wanted.items():
            tensor: torch.Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype is not torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected int32 {shape}")
        if self.log.shape[0] & (self.log.shape[0] - 1):
            raise ValueError(f"a log of {self.log.shape[0]} events: their number has to be a power of two")
        if self.arena.shape[1] != self.pool.shape[1]:
            raise ValueError(f"rows of {self.arena.shape[1]} bytes for slots of {self.pool.shape[1]}")

    @property
    def layers(self) -> int:
        return self.table.shape[0]

    @property
    def experts(self) -> int:
        return self.table.shape[1]

    @property
    def slots(self) -> int:
        return self.pool.shape[0]


def make_admission(
    layers: int,
    experts: int,
    arena: torch.Tensor,
    pool: torch.Tensor,
    *,
    log_events: int | None = None,
    first: int = 0,
) -> Admission:
    """An empty state over `pool` (uint8 [S, stride] on its device) and `arena` (uint8 [places, stride]).

    log_events: room of the log, rounded up to a power of two; None: what one pass can fill. first: see Admission.
    """

    def words(*shape: int, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=pool.device)

    keys = layers * experts
    return Admission(
        table=words(layers, experts, fill=ABSENT),
        owners=words(pool.shape[0], fill=ABSENT),
        heat=words(keys),
        last=words(keys),
        places=words(keys, fill=ABSENT),
        copies=words(experts, 2),
        state=words(STATE_WORDS),
        log=words(1 << ((log_events or keys) - 1).bit_length(), 4),
        arena=arena,
        pool=pool,
        first=first,
    )


def decayed(heat: int, age: int) -> int:
    """Heat after `age` passes; the rule above, one number at a time."""
    q, f = divmod(age, HALF_LIFE)
    value = heat >> q if q <= 31 else 0
    return value - (((value >> 1) * f) // HALF_LIFE)
