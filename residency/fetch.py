"""Bringing rows into the pool: one batch, from the arena where it has them, else from the pack through it."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ziggurat.residency.host_cache import HostCache, RowBatch, RowFault, Source
from ziggurat.residency.slots import SlotPool

SOURCES: tuple[Source, ...] = ("arena", "pack")


class Entry(Enum):
    """How a fetched row enters the pool's eviction order.

    USED: as used now. UNPROVEN: at the cold end, because the pass that wanted it may have been routed wrongly; it is
    touched if the step's final pass uses it. SEED: by heat of earlier runs, and without a copy in the arena.
    """

    USED = "used"
    UNPROVEN = "unproven"
    SEED = "seed"


@dataclass(slots=True)
class FetchTally:
    """Fetches into the pool since the tally was last taken. seconds: per row, read and copy together."""

    rows: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    seconds: dict[Source, list[float]] = field(default_factory=lambda: {source: [] for source in SOURCES})
    io_errors: int = 0
    verification_failures: int = 0


@dataclass(slots=True)
class FetchOutcome:
    """arrived: keys that have a slot now. faults: rows that could not be read. Keys in neither found no slot."""

    arrived: list[int] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)


class Fetcher:
    """Moves rows from the host cache into slots and publishes each one after its bytes are in place.

    The pool's `write` must be complete when it returns, so that a row's place in the arena is settled at once.
    """

    def __init__(self, slots: SlotPool, cache: HostCache) -> None:
        self._slots = slots
        self._cache = cache
        self._tally = FetchTally()

    def take_tally(self) -> FetchTally:
        """Everything fetched since the last call."""
        tally, self._tally = self._tally, FetchTally()
        return tally

    def fetch(
        self,
        wanted: Mapping[int, float],
        *,
        blocked: Container[int],
        epoch: int,
        entry: Entry = Entry.USED,
    ) -> FetchOutcome:
        """Fetch absent rows, as many as slots can be had without evicting a key in `blocked`, in the given order.

        wanted: key -> weight as in EvictionPolicy.insert, or heat if the entry is SEED. Read errors are returned,
        never raised.
        """
        slots = dict(zip(wanted, self._slots.take(len(wanted), blocked), strict=False))
        outcome = FetchOutcome()
        written: set[int] = set()
        try:
            accepted = {key: wanted[key] for key in slots}
            for batch in self._cache.rows(accepted, epoch=epoch, keep=entry is not Entry.SEED):
                self._store(batch, slots)
                written.update(row.key for row in batch.rows)
                outcome.faults += batch.faults
        finally:
            # In the order asked for, so that what is evicted later does not depend on the disk's timing.
            for key, slot in slots.items():
                if key in written:
                    weight = 0.0 if entry is Entry.UNPROVEN else wanted[key]
                    self._slots.publish(slot, key, weight, seed=entry is Entry.SEED)
                    outcome.arrived.append(key)
                else:
                    self._slots.give_back([slot])
        return outcome

    def _store(self, batch: RowBatch, slots: Mapping[int, int]) -> None:
        """Write a batch's rows to their slots and count it."""
        if batch.rows:
            begun = time.perf_counter()
            self._slots.pool.write([slots[row.key] for row in batch.rows], [row.row for row in batch.rows])
            copy_seconds = (time.perf_counter() - begun) / len(batch.rows)
            self._cache.settle(batch)
            for row in batch.rows:
                self._tally.rows[row.source] += 1
                self._tally.seconds[row.source].append(row.seconds + copy_seconds)
        self._tally.io_errors += len(batch.faults)
        self._tally.verification_failures += sum(fault.verification for fault in batch.faults)
