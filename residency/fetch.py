"""Bringing rows into the pool: one batch, from the arena where it has them, else from the pack through it."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ziggurat.residency.host_cache import HostCache, RowBatch, RowFault, Source
from ziggurat.residency.slots import SlotPool

SOURCES: tuple[Source, ...] = ("arena", "pack")


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
        self, wanted: Mapping[int, float], *, blocked: Container[int], epoch: int, seed: bool = False
    ) -> FetchOutcome:
        """Fetch absent rows, as many as slots can be had without evicting a key in `blocked`, in the given order.

        wanted: key -> weight as in EvictionPolicy.insert (with seed=True: heat as in EvictionPolicy.seed, and the
        rows are not kept in the arena). Read errors are returned, never raised.
        """
        slots = self._slots.take(len(wanted), blocked)
        accepted = dict(islice(wanted.items(), len(slots)))
        outcome = FetchOutcome()
        slots.reverse()  # the slots not written to yet are slots[:]; the next one is at the end
        try:
            for batch in self._cache.rows(accepted, epoch=epoch, keep=not seed):
                self._store(batch, slots, accepted, outcome, seed)
        finally:
            self._slots.give_back(slots)
        return outcome

    def _store(
        self,
        batch: RowBatch,
        slots: list[int],
        weights: Mapping[int, float],
        outcome: FetchOutcome,
        seed: bool,
    ) -> None:
        if batch.rows:
            targets = slots[: -len(batch.rows) - 1 : -1]
            begun = time.perf_counter()
            self._slots.pool.write(targets, [row.row for row in batch.rows])
            copy_seconds = (time.perf_counter() - begun) / len(batch.rows)
            self._cache.settle(batch)
            del slots[-len(batch.rows) :]
            for slot, row in zip(targets, batch.rows, strict=True):
                self._slots.publish(slot, row.key, weights[row.key], seed=seed)
                outcome.arrived.append(row.key)
                self._tally.rows[row.source] += 1
                self._tally.seconds[row.source].append(row.seconds + copy_seconds)
        for fault in batch.faults:
            outcome.faults.append(fault)
            self._tally.io_errors += 1
            self._tally.verification_failures += fault.verification
