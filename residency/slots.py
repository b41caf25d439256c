"""The device pool's books: which row is in which slot, which slots are free, which row leaves next.

Everything is an instance with a codec. A second pool of another precision is a second instance.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.kernels.admission import WITHHELD
from ziggurat.residency.passes import BoolArray
from ziggurat.residency.policies.base import EvictionPolicy
from ziggurat.residency.ports import RowPool
from ziggurat.residency.runtime_errors import SlotError

ABSENT = -1
_FREE = -1
_TAKEN = -2  # out of the free list, bytes on the way, not published
IntArray32 = npt.NDArray[np.int32]


def slot_order(slots: int, seed: int | None) -> list[int]:
    """In which order slots are handed out: ascending, or shuffled by a seed."""
    order = list(range(slots))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order


class SlotTable:
    """int32 [layers, experts] of slot numbers, -1 where absent, and the owner of every slot.

    `table` and `numpy` are two views of one memory; a device's copy of it is behind if it was made at another
    `version`. `codec` says what the rows in these slots are.
    """

    def __init__(self, layers: int, experts: int, slots: int, codec: str) -> None:
        self.layers = layers
        self.experts = experts
        self.codec = codec
        self.table = torch.full((layers, experts), ABSENT, dtype=torch.int32)
        self.numpy: npt.NDArray[np.int32] = self.table.numpy()
        self.owners = [_FREE] * slots
        self.version = 0  # changes with every change of the table

    def slot_of(self, key: int) -> int:
        """Slot of a row key, or -1."""
        return int(self.numpy[key // self.experts, key % self.experts])

    def bind(self, slot: int, key: int) -> None:
        self.numpy[key // self.experts, key % self.experts] = slot
        self.owners[slot] = key
        self.version += 1

    def unbind(self, slot: int) -> None:
        key = self.owners[slot]
        self.numpy[key // self.experts, key % self.experts] = ABSENT
        self.owners[slot] = _FREE
        self.version += 1


class SlotPool:
    """Slots are taken (which may evict), written, then published; only a published row can be found.

    A device that makes its own experts resident gets the slots with `hand_over`: the host then takes and evicts
    nothing any more and its table is a mirror, as new as the last `follow`.

    pool: the device memory. policy: empty, and owned by this object from here on. slot_order: the order in which
    free slots are handed out first; any permutation gives the same results (tests shuffle it). order: the latest one.
    """

    def __init__(
        self,
        pool: RowPool,
        table: SlotTable,
        policy: EvictionPolicy,
        slot_order: Iterable[int] | None = None,
    ) -> None:
        if len(table.owners) != pool.slots:
            raise SlotError(f"the slot table is for {len(table.owners)} slots, the pool has {pool.slots}")
        if pool.slots < 1:
            raise SlotError("a pool needs at least one slot; raise tiers.device.size")
        self.pool = pool
        self.table = table
        self.policy = policy
        self.evictions = 0
        self.handed_over = False  # whether a device owns the slots
        self._withheld: list[int] = []
        self.order = self._order(slot_order)
        self._free = self.order[::-1]  # popped from the end

    def _order(self, wanted: Iterable[int] | None) -> list[int]:
        order = list(range(self.pool.slots) if wanted is None else wanted)
        if sorted(order) != list(range(self.pool.slots)):
            raise SlotError(f"slot_order must be a permutation of 0..{self.pool.slots - 1}")
        return order

    @property
    def slots(self) -> int:
        """Slots in use or free to use."""
        return self.pool.slots - len(self._withheld)

    def restart(self, slots: int, slot_order: Iterable[int] | None = None) -> None:
        """Forget every row, and use only the first `slots` of `slot_order` from now on."""
        if not 1 <= slots <= self.pool.slots:
            raise SlotError(f"a pool of {self.pool.slots} slots cannot go on with {slots}")
        if _TAKEN in self.table.owners:
            raise SlotError("a pool cannot start anew while rows are on their way into it")
        self.order = order = self._order(slot_order)
        for key in self.held():
            if not self.handed_over:
                self.policy.remove(key)
            self.table.unbind(self.table.slot_of(key))
        self._free, self._withheld = order[:slots][::-1], order[slots:]
        self.handed_over = False

    # -- slots that a device owns ------------------------------------------------------------------------------

    def hand_over(self) -> tuple[IntArray32, IntArray32]:
        """A device owns the slots from here on, until `restart`: table [L, E], and the key in each slot [S], -1 for
        none, -2 for a slot that is not to be used."""
        if _TAKEN in self.table.owners:
            raise SlotError("a pool cannot be handed over while rows are on their way into it")
        for key in [] if self.handed_over else self.held():
            self.policy.remove(key)
        self.handed_over = True
        self._free = []
        owners = np.array(self.table.owners, dtype=np.int32)
        owners[self._withheld] = WITHHELD
        return self.table.numpy.copy(), owners

    def follow(self, keys: IntArray32, slots: IntArray32, evicted: IntArray32) -> None:
        """What the device did, in order: keys [N] came into slots [N], where evicted [N] had been (-1: nothing)."""
        # In turn: what leaves, what comes. Of the same key only the last one stands.
        changed = np.stack([evicted, keys], axis=1).reshape(-1)
        places = np.stack([np.full_like(slots, ABSENT), slots], axis=1).reshape(-1)
        done = changed != ABSENT
        self.table.numpy.reshape(-1)[changed[done]] = places[done]
        for slot, key in zip(slots.tolist(), keys.tolist(), strict=True):
            self.table.owners[slot] = key
        self.table.version += 1
        self.evictions += int(np.count_nonzero(evicted != ABSENT))

    def mirror(self, table: IntArray32, owners: IntArray32) -> None:
        """The device's table [L, E] and owners [S] as they are, where what it did is not known."""
        self.table.numpy[...] = table
        self.table.owners[:] = np.maximum(owners, _FREE).tolist()
        self.table.version += 1

    @property
    def used(self) -> int:
        """Published slots."""
        if self.handed_over:
            return int(np.count_nonzero(self.table.numpy != ABSENT))
        return len(self.policy)

    @property
    def complete(self) -> bool:
        """Whether every row has a slot. It stays so, because then nothing is ever evicted."""
        return self.used == self.table.layers * self.table.experts

    @property
    def free(self) -> int:
        """Slots that can be taken without evicting anything."""
        return len(self._free)

    def resident(self, layer: int, experts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of `experts` [n] of one layer have a slot."""
        found: npt.NDArray[np.bool_] = self.table.numpy[layer, experts] != ABSENT
        return found

    def row(self, key: int) -> torch.Tensor:
        """The bytes of a resident row, uint8 [stride]. SlotError if it has no slot."""
        slot = self.table.slot_of(key)
        if slot == ABSENT:
            raise SlotError(f"row {key} was read but has no slot")
        return self.pool.row(slot)

    def take(self, count: int, blocked: Container[int]) -> list[int]:
        """Up to `count` slots to write to, free ones first, then victims whose key is not in `blocked`.

        Victims can no longer be found when this returns. Fewer slots than asked for: the rest is blocked.
        """
        if self.handed_over:
            raise SlotError("the slots belong to the device, which takes them by itself")
        taken: list[int] = []
        while len(taken) < count:
            if self._free:
                slot = self._free.pop()
            else:
                victim = self.policy.victim(blocked)
                if victim is None:
                    break
                slot = self.table.slot_of(victim)
                self.policy.remove(victim)
                self.table.unbind(slot)
                self.evictions += 1
            self.table.owners[slot] = _TAKEN
            taken.append(slot)
        return taken

    def publish(self, slot: int, key: int, weight: float, *, seed: bool = False) -> None:
        """The bytes of `key` are in `slot`: make it findable. `weight` as in EvictionPolicy.insert (or .seed)."""
        if self.table.owners[slot] != _TAKEN:
            raise SlotError(f"slot {slot} was published for row {key} but had not been taken")
        if self.table.slot_of(key) != ABSENT:
            raise SlotError(f"row {key} already has slot {self.table.slot_of(key)}")
        self.table.bind(slot, key)
        if seed:
            self.policy.seed(key, weight)
        else:
            self.policy.insert(key, weight)

    def give_back(self, slots: Sequence[int]) -> None:
        """Taken slots whose bytes never arrived."""
        for slot in slots:
            if self.table.owners[slot] != _TAKEN:
                raise SlotError(f"slot {slot} was given back but had not been taken")
            self.table.owners[slot] = _FREE
            self._free.append(slot)

    def routed(self, layer: int, ids: npt.NDArray[np.integer], prefill: BoolArray | None) -> None:
        """Tell the policy where a layer's tokens go, ids [T, k]; before their touches and fetches."""
        self.policy.routed(layer, ids if prefill is None else ids[~prefill])

    def touch(self, weights: Mapping[int, float]) -> None:
        """Record uses of resident rows: key -> routed pairs."""
        for key, weight in weights.items():
            self.policy.touch(key, weight)

    def held(self) -> Collection[int]:
        """Keys of all published rows."""
        return [owner for owner in self.table.owners if owner >= 0]

    def check(self) -> None:
        """SlotError if table, owners, policy and free list disagree. O(layers * experts); for tests."""
        owners = self.table.owners
        for slot, owner in enumerate(owners):
            if owner >= 0 and self.table.slot_of(owner) != slot:
                raise SlotError(f"slot {slot} is owned by row {owner}, whose table entry says otherwise")
        bound = int((self.table.numpy != ABSENT).sum())
        if bound != sum(owner >= 0 for owner in owners) or bound != self.used:
            raise SlotError(f"{bound} table entries, {self.used} published slots, owners {owners}")
        if self.handed_over:
            if len(self.policy) or self._free or any(owners[slot] >= 0 for slot in self._withheld):
                raise SlotError(
                    "the host holds on to slots that belong to the device, or a withheld one is used"
                )
            return
        if set(self.policy.order()) != set(self.held()):
            raise SlotError("the policy holds other keys than the slots")
        free = [slot for slot, owner in enumerate(owners) if owner == _FREE]
        if sorted([*self._free, *self._withheld]) != free:
            raise SlotError(f"free list {sorted(self._free)} against unowned slots {free}")
