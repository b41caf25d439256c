"""Bringing rows into the pool: one batch, from the arena where it has them, else from the pack through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from ziggurat.residency.host_cache import HostCache, RowBatch, RowFault, Source
from ziggurat.residency.ports import RowPool
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
    """Fetches into the pool since the tally was last taken, and rows that went to staging memory instead.

    seconds: per row of the pool, read and copy together; on a device the copy counts until it is queued. asked: rows
    that each fetch was for. keys: of the rows that came into the pool.
    """

    rows: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    staged: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    seconds: dict[Source, list[float]] = field(default_factory=lambda: {source: [] for source in SOURCES})
    asked: list[float] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    io_errors: int = 0
    verification_failures: int = 0


@dataclass(slots=True)
class FetchOutcome:
    """arrived: keys that have a slot now. faults: rows that could not be read. Keys in neither found no slot."""

    arrived: list[int] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)


class Fetcher:
    """Moves rows from the host cache into slots and publishes each one after its bytes are in place.

    On a device "in place" is meant in the order of its stream: a fetch queues its copies and returns, and whatever
    is queued after that sees them. The place of a row in the arena stays in use until the copy out of it is known to
    be complete: somebody has waited for work behind it (`arrived`), or waits for it (`drain`). That must happen
    before the step's epoch is closed.
    """

    def __init__(self, slots: SlotPool, cache: HostCache) -> None:
        self._slots = slots
        self._cache = cache
        self._tally = FetchTally()
        self._copying: list[tuple[RowPool, RowBatch]] = []
        self.seconds = 0.0  # spent in `fetch` and `stage` in all
        self.upcoming: Callable[[Sequence[int]], None] = lambda keys: None  # hears what a scan comes to next
        self.on_depth: Callable[[int], None] = lambda rows: None  # hears how many rows are being fetched

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
        with self._at_work(len(wanted)):
            return self._fetch(wanted, blocked, epoch, entry)

    @contextmanager
    def _at_work(self, rows: int) -> Iterator[None]:
        """Books how many rows were asked for and how long that took."""
        begun = time.perf_counter()
        self.on_depth(rows)
        if rows:
            self._tally.asked.append(float(rows))
        try:
            yield
        finally:
            self.on_depth(0)
            self.seconds += time.perf_counter() - begun

    def _fetch(
        self, wanted: Mapping[int, float], blocked: Container[int], epoch: int, entry: Entry
    ) -> FetchOutcome:
        slots = dict(zip(wanted, self._slots.take(len(wanted), blocked), strict=False))
        outcome = FetchOutcome()
        written: set[int] = set()
        try:
            accepted = {key: wanted[key] for key in slots}
            keep = entry is not Entry.SEED
            for batch in self._cache.rows(accepted, epoch=epoch, keep=keep, reclaim=self.drain):
                self._store(batch, slots)
                written.update(row.key for row in batch.rows)
                outcome.faults += batch.faults
        finally:
            if written:
                self._slots.pool.ready()
            # In the order asked for, so that what is evicted later does not depend on the disk's timing.
            for key, slot in slots.items():
                if key in written:
                    weight = 0.0 if entry is Entry.UNPROVEN else wanted[key]
                    self._slots.publish(slot, key, weight, seed=entry is Entry.SEED)
                    outcome.arrived.append(key)
                else:
                    self._slots.give_back([slot])
        return outcome

    def stage(self, keys: Sequence[int], memory: RowPool, *, epoch: int) -> list[RowFault]:
        """Copy the row of `keys[i]` to slot i of `memory`, which is not the pool: no slot changes hands.

        Rows that are only on disk pass through the arena as a scan's do: they fill free places and evict nothing.
        Work queued behind `memory.ready()` sees them. The rows of the faults returned are left as they were.
        """
        slots = {key: i for i, key in enumerate(keys)}
        faults: list[RowFault] = []
        wanted = dict.fromkeys(keys, 0.0)
        self._settle_passed()
        with self._at_work(len(keys)):
            for batch in self._cache.rows(wanted, epoch=epoch, reclaim=self.drain):
                self._copy(batch, slots, memory)
                for row in batch.rows:
                    self._tally.staged[row.source] += 1
                self._count_faults(batch)
                faults += batch.faults
        return faults

    @property
    def copying(self) -> bool:
        """Whether copies may still read the arena."""
        return bool(self._copying)

    def drain(self) -> bool:
        """Wait until every copy is complete and give their places back. False if there was none."""
        if not self._copying:
            return False
        for memory in {id(memory): memory for memory, _ in self._copying}.values():
            memory.drain()
        self.arrived()
        return True

    def _settle_passed(self) -> None:
        """Give back the places of copies that are known to be complete, without waiting for any."""
        left: list[tuple[RowPool, RowBatch]] = []
        under_way: dict[int, int] = {}
        for memory, batch in reversed(self._copying):  # the latest are those under way
            pending = getattr(memory, "pending", None)
            if pending is None:
                left.append((memory, batch))
                continue
            more = under_way.setdefault(id(memory), pending())
            if more:
                under_way[id(memory)] = more - 1
                left.append((memory, batch))
            else:
                self._cache.settle(batch)
        self._copying = left[::-1]

    def arrived(self) -> None:
        """The caller has waited for work that is queued behind all copies so far: their places are free again."""
        for _, batch in self._copying:
            self._cache.settle(batch)
        self._copying.clear()

    def _store(self, batch: RowBatch, slots: Mapping[int, int]) -> None:
        """Write a batch's rows to their slots and count it."""
        begun = time.perf_counter()
        self._copy(batch, slots, self._slots.pool)
        copy_seconds = (time.perf_counter() - begun) / max(1, len(batch.rows))
        for row in batch.rows:
            self._tally.rows[row.source] += 1
            self._tally.seconds[row.source].append(row.seconds + copy_seconds)
            self._tally.keys.append(row.key)
        self._count_faults(batch)

    def _copy(self, batch: RowBatch, slots: Mapping[int, int], memory: RowPool) -> None:
        if not batch.rows:
            return
        memory.write([slots[row.key] for row in batch.rows], [row.row for row in batch.rows])
        if copies_later(memory):
            self._copying.append((memory, batch))
        else:
            self._cache.settle(batch)

    def _count_faults(self, batch: RowBatch) -> None:
        self._tally.io_errors += len(batch.faults)
        self._tally.verification_failures += sum(fault.verification for fault in batch.faults)


def copies_later(pool: RowPool) -> bool:
    """Whether a pool's writes may be on their way when `write` returns."""
    return bool(getattr(pool, "asynchronous", pool.device.type != "cpu"))
