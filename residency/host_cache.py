"""The host arena as a cache over the pack.

A place of the arena holds one row. Most places are cache: a key is found there until another row needs the place.
A few places are staging: rows that may not displace anything pass through them, and the place is free again as soon
as the row has been copied on. Three rules hold whatever happens:

* a key is findable only after its bytes arrived and were verified, so a failed read never becomes a hit;
* rows that only a scan wants (weight 0) fill free places and never evict, nor is anything evicted that was fixed;
* a place that a step in flight may still read is not written to before that step's epoch is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ziggurat.residency.ledger import Ledger
from ziggurat.residency.policies.base import NO_IDS, EvictionPolicy
from ziggurat.residency.ports import RowArena, RowPack
from ziggurat.residency.runtime_errors import HostCacheError
from ziggurat.stores.counts import PackCounts
from ziggurat.stores.pack import RowRequest

Source = Literal["arena", "pack"]


@dataclass(frozen=True, slots=True)
class ArrivedRow:
    """A row in host memory. `row` (uint8 [stride]) is valid until its batch is settled.

    source: where it was found. seconds: time its read took (0 for a row the arena had).
    """

    key: int
    row: torch.Tensor
    source: Source
    seconds: float
    place: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that could not be read. verification: its bytes arrived but were wrong."""

    key: int
    reason: str
    verification: bool


@dataclass(slots=True)
class RowBatch:
    rows: list[ArrivedRow] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)


@dataclass(slots=True)
class FillReport:
    """What a background fill did. full: no free place was left, so filling is over."""

    read: int = 0
    faults: list[RowFault] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    full: bool = False


@dataclass(slots=True)
class _Reservation:
    key: int
    weight: float
    place: int
    cached: bool


class HostCache:
    """Serves rows by key, from the arena or from the pack through it. Safe for one step and one filling thread.

    arena: all its places belong to this object. policy: empty; holds the keys that can be found. staging: how many
    places never cache (at least 1; all of them if the arena has no more; none if the arena has a place for every row
    of the pack and no more, since then every read has a place of its own). experts: per layer, to split keys.
    ledger: of an arena that others share; its private places are the staging then, and rows that are there are found.
    """

    def __init__(
        self,
        pack: RowPack,
        arena: RowArena,
        policy: EvictionPolicy,
        *,
        experts: int,
        staging: int,
        ledger: Ledger | None = None,
    ) -> None:
        if arena.places < 1 or staging < 1:
            raise HostCacheError(
                f"an arena of {arena.places} places with {staging} for staging cannot hold a read in flight"
            )
        if arena.stride != pack.header.stride:
            raise HostCacheError(f"arena stride {arena.stride} B, pack stride {pack.header.stride} B")
        self.policy = policy
        self.stride = arena.stride
        rows = pack.header.layers * pack.header.experts
        self.staging = min(staging, arena.places if arena.places < rows else arena.places - rows)
        if ledger is not None:
            self.staging = ledger.private
        self.evictions = 0
        self.waits = 0  # requests that found no place and had to wait for another thread or step
        self._pack = pack
        self._arena = arena
        self._experts = experts
        self._changed = threading.Condition()
        self._place_of: dict[int, int] = {}
        self._ledger = ledger
        self._free = list(range(arena.places - 1, self.staging - 1, -1))
        self._idle_staging = list(range(self.staging - 1, -1, -1))
        self._fixed: set[int] = set()  # keys whose places are theirs for good; the policy does not know them
        self._reading: set[int] = set()  # keys on their way into a cache place
        self._readers: list[list[int]] = [[] for _ in range(arena.places)]  # epochs that may read a place
        self._open_epochs: set[int] = set()
        self._last_epoch = 0
        self.adopted = 0 if ledger is None else self._adopt(ledger)  # rows that were there before

    @property
    def capacity(self) -> int:
        """Places that can hold findable rows."""
        return self._arena.places - self.staging

    @property
    def used(self) -> int:
        """Findable rows."""
        return len(self._place_of)

    def pack_counts(self) -> PackCounts:
        """What reads of the pack met so far."""
        return self._pack.counts()

    def holds(self, key: int) -> bool:
        """Whether the arena has the row of `key` right now."""
        return key in self._place_of

    # -- an arena that others share ----------------------------------------------------------------------------

    def _adopt(self, ledger: Ledger) -> int:
        """Rows that the arena's memory held before this cache was made can be found from now on. How many there are."""
        ledger.guarded_by(self._changed)
        with self._changed:
            self._learn()
            self._free = list(reversed(ledger.free()))  # also the places of rows that were refused
            return len(self._place_of)

    def rank(self, heat_of: Callable[[int], float]) -> None:
        """If rows were adopted, put all that can be evicted in the order of heat, as if they had been filled in it."""
        with self._changed:
            evictable = self._place_of.keys() - self._fixed if self.adopted else ()
            for key in sorted(evictable, key=lambda key: (-heat_of(key), key)):
                self.policy.remove(key)
                self.policy.seed(key, heat_of(key))

    def _learn(self) -> None:
        """Rows that another process has published meanwhile."""
        if self._ledger is not None:
            for key, place in self._ledger.news().items():
                if key not in self._place_of:
                    self._bind(key, place)
                    self.policy.seed(key, 0.0)

    def _may_evict(self) -> bool:
        return self._ledger is None or not self._ledger.frozen

    # -- epochs ------------------------------------------------------------------------------------------------

    def open_epoch(self) -> int:
        """Start of a step. Places given out under this epoch stay untouched until it is closed or settled."""
        with self._changed:
            self._last_epoch += 1
            self._open_epochs.add(self._last_epoch)
            return self._last_epoch

    def close_epoch(self, epoch: int) -> None:
        """The step has finished: nothing that it started reads the arena any more."""
        with self._changed:
            self._open_epochs.discard(epoch)
            self._changed.notify_all()

    def settle(self, batch: RowBatch) -> None:
        """The copies out of `batch` are complete, so its places need not wait for the end of the step."""
        with self._changed:
            for row in batch.rows:
                if row.epoch in self._readers[row.place]:
                    self._readers[row.place].remove(row.epoch)
            self._changed.notify_all()

    def advance(self, steps: int = 1) -> None:
        """Steps of the model have passed."""
        with self._changed:
            self.policy.advance(steps)

    # -- reading -----------------------------------------------------------------------------------------------

    def rows(
        self,
        wanted: Mapping[int, float],
        *,
        epoch: int,
        keep: bool = True,
        reclaim: Callable[[], bool] = lambda: False,
    ) -> Generator[RowBatch, None, None]:
        """Every wanted row once, in batches, found ones first, then as reads complete.

        wanted: key -> weight (0 = wanted by a scan only). keep=False: read without caching. A key whose read failed
        is in a batch's `faults` and is not tried again here. Settle each batch before asking for the next one if
        the copy out of it is complete by then; otherwise its places stay in use until the epoch closes, or until
        `reclaim` settles what it can, which is called when places are short and returns whether it did anything.

        HostCacheError if every place is in use by the asking step itself.
        """
        remaining = dict(wanted)
        while remaining:
            found = self._find(remaining, epoch)
            if found.rows:
                yield found
            if not remaining:
                return
            plan = self._reserve(remaining, epoch, keep)
            if plan is None:
                if not reclaim():
                    raise HostCacheError(
                        f"all {self._arena.places} places of the host arena are in use by this very step; raise "
                        "tiers.host.size, or settle batches once they have been copied"
                    )
                continue
            if plan:
                yield from self._read(plan, remaining, epoch)
                if remaining:
                    reclaim()

    def fill(self, wanted: Iterable[tuple[int, float]], limit: int) -> FillReport:
        """Read up to `limit` of the wanted (key, heat) rows that are not here yet into free places; for a
        background thread. Never evicts, never uses staging, never waits for a step."""
        plan: list[_Reservation] = []
        report = FillReport()
        with self._changed:
            for key, heat in wanted:
                if len(plan) == limit:
                    break
                if key in self._place_of or key in self._reading:
                    continue
                if not self._free:
                    report.full = True
                    break
                self._reading.add(key)
                plan.append(_Reservation(key, heat, self._free.pop(), cached=True))
        unused: dict[int, float] = {item.key: 0.0 for item in plan}
        for batch in self._read(plan, unused, epoch=0, seed=True) if plan else ():
            report.read += len(batch.rows)
            report.seconds += [row.seconds for row in batch.rows]
            report.faults += batch.faults
        return report

    def fix(self, keys: Sequence[int]) -> dict[int, int]:
        """Read rows that stay where they are for good; before anything else has used the cache. Their places.

        HostCacheError if they are more than the free places, or if one of them cannot be read.
        """
        with self._changed:
            found = [key for key in keys if key in self._place_of]  # adopted
            for key in found:
                self.policy.remove(key)
            absent = [key for key in keys if key not in self._place_of]
            while len(self._free) < len(absent) and (victim := self._victim_if_any()) is not None:
                self._free.append(self._unbind(victim))
            if len(absent) > len(self._free):
                raise HostCacheError(
                    f"{len(absent)} rows want a place for good, and the host arena has {len(self._free)} beside those"
                    " for reads in flight; raise tiers.host.size, or take layers out of tiers.device.direct_layers"
                )
            plan = [_Reservation(key, 0.0, self._free.pop(), cached=True) for key in absent]
            self._fixed.update(keys)
            self._reading.update(absent)
        faults: list[RowFault] = []
        for batch in self._read(plan, dict.fromkeys(absent, 0.0), epoch=0) if plan else ():
            faults += batch.faults
        if faults:
            layer, expert = divmod(faults[0].key, self._experts)
            raise HostCacheError(
                f"{len(faults)} rows of tiers.device.direct_layers could not be read; expert {expert} of layer "
                f"{self._pack.header.layer_ids[layer]} first: {faults[0].reason}"
            )
        return {key: self._place_of[key] for key in keys}

    def check(self) -> None:
        """HostCacheError unless every place has exactly one role, with no read in progress. For tests."""
        with self._changed:
            roles = [*self._free, *self._idle_staging, *self._place_of.values(), *self._between()]
            places = range(self._arena.places)
            # Of shared places some may be lost, and a reader has a role for published ones only.
            each = sorted(roles) == list(places) if self._ledger is None else len(set(roles)) == len(roles)
            if not each or not set(roles) <= set(places) or self._reading:
                raise HostCacheError(
                    f"places {sorted(roles)} have a role, rows {self._reading} are being read"
                )
            if set(self.policy.order()) != set(self._place_of) - self._fixed:
                raise HostCacheError("the policy holds other keys than can be found")

    def _between(self) -> list[int]:
        """Places that hold no row and may not be written to yet."""
        return []

    def _find(self, remaining: dict[int, float], epoch: int) -> RowBatch:
        batch = RowBatch()
        with self._changed:
            self._learn()
            self.policy.routed(self._layer_of(remaining), NO_IDS)
            for key in [key for key in remaining if key in self._place_of]:
                place = self._place_of[key]
                weight = remaining.pop(key)
                if key not in self._fixed:
                    self.policy.touch(key, weight)
                batch.rows.append(self._arrived(key, place, "arena", 0.0, epoch))
        return batch

    def _layer_of(self, keys: Iterable[int]) -> int:
        """The layer that keys are of; the last one of the model if they are of several, since a step begins anew when
        these are there."""
        layers = {key // self._experts for key in keys}
        return layers.pop() if len(layers) == 1 else self._pack.header.layers - 1

    def _arrived(self, key: int, place: int, source: Source, seconds: float, epoch: int) -> ArrivedRow:
        readers = self._readers[place]
        readers[:] = [open_one for open_one in readers if open_one in self._open_epochs]
        readers.append(epoch)
        return ArrivedRow(key, self._arena.tensor[place], source, seconds, place, epoch)

    def _reserve(self, remaining: Mapping[int, float], epoch: int, keep: bool) -> list[_Reservation] | None:
        """Places for as many of the remaining keys as there is room for; waits if there is none right now.

        Empty if another thread has brought a remaining key in the meantime; None if only the asking step itself
        can make room.
        """
        waited = False
        with self._changed:
            while True:
                plan = self._plan(remaining, keep)
                self._reading.update(item.key for item in plan if item.cached)
                if plan:
                    return plan
                if any(key in self._place_of for key in remaining):
                    return []
                if not self._reading and self._open_epochs <= {epoch}:
                    return None
                if not waited:
                    waited = True
                    self.waits += 1
                    self._changed.notify_all()
                self._changed.wait()

    def _victim_if_any(self) -> int | None:
        """A key whose place may be written to at once."""
        return self._victim() if self._may_evict() else None

    def _victim(self) -> int | None:
        """Of the rows that may leave."""
        return self.policy.victim(_InFlight(self))

    def _bind(self, key: int, place: int) -> None:
        """The row of `key` is in `place` from now on."""
        self._place_of[key] = place

    def _unbind(self, key: int) -> int:
        """Evict a key; its place."""
        self.policy.remove(key)
        self.evictions += 1
        place = self._place_of.pop(key)
        if self._ledger is not None:
            self._ledger.vacate(place)
        return place

    def _plan(self, remaining: Mapping[int, float], keep: bool) -> list[_Reservation]:
        """Places for remaining keys, in their order, as far as there are any.

        Whoever may evict is asked until there is nothing to evict, and then no more: that answer may take a look at
        every row in flight, and it is the same for the keys that follow.
        """
        plan: list[_Reservation] = []
        caches = keep or not self.staging
        evicts = caches
        staging = [place for place in self._idle_staging if self.quiet(place)]
        for key, weight in remaining.items():
            if key in self._reading or key in self._place_of:  # brought by another thread since we looked
                continue
            place = self._free.pop() if caches and self._free else None
            if place is None and evicts and weight > 0.0:
                victim = self._victim_if_any()
                if victim is None:
                    evicts = False
                else:
                    place = self._unbind(victim)
            if place is not None:
                plan.append(_Reservation(key, weight, place, cached=True))
            elif staging:
                place = staging.pop()
                self._idle_staging.remove(place)
                plan.append(_Reservation(key, weight, place, cached=False))
            elif not evicts:
                break
        return plan

    def quiet(self, place: int) -> bool:
        """No step in flight may read the place."""
        return self._open_epochs.isdisjoint(self._readers[place])

    def _read(
        self, plan: Sequence[_Reservation], remaining: dict[int, float], epoch: int, *, seed: bool = False
    ) -> Iterator[RowBatch]:
        arrived: set[int] = set()
        pending = {item.key for item in plan}
        requests = [
            RowRequest(*divmod(item.key, self._experts), self._arena.view(item.place), sole=item.cached)
            for item in plan
        ]
        places = {item.key: item.place for item in plan}
        for item in plan:
            if item.cached and self._ledger is not None:
                self._ledger.fill(item.place)
        results = self._pack.read_rows(requests)
        try:
            for result in results:
                key = result.layer * self._experts + result.expert
                pending.remove(key)
                del remaining[key]
                batch = RowBatch()
                if result.error is None:
                    with self._changed:
                        batch.rows.append(self._arrived(key, places[key], "pack", result.seconds, epoch))
                    arrived.add(key)
                else:
                    corrupt = result.error.kind == "checksum"
                    batch.faults.append(RowFault(key, result.error.reason, corrupt))
                yield batch
        finally:
            # Closing joins the reads in progress: no place is handed on while bytes may still land in it.
            results.close()
            with self._changed:
                # In the order of the plan, so that what is evicted later does not depend on the disk's timing.
                for item in plan:
                    self._publish(item, seed) if item.key in arrived else self._release(item)
                self._changed.notify_all()
        if pending:
            raise HostCacheError(f"the pack reported no result for rows {sorted(pending)}")

    def _publish(self, item: _Reservation, seed: bool) -> None:
        if not item.cached:
            self._idle_staging.append(item.place)
            return
        self._reading.discard(item.key)
        if self._ledger is not None:
            self._ledger.publish(item.place, item.key)
        self._bind(item.key, item.place)
        if item.key in self._fixed:
            return
        if seed:
            self.policy.seed(item.key, item.weight)
        else:
            self.policy.insert(item.key, item.weight)

    def _release(self, item: _Reservation) -> None:
        if item.cached:
            self._reading.discard(item.key)
            self._free.append(item.place)
            if self._ledger is not None:
                self._ledger.vacate(item.place)
        else:
            self._idle_staging.append(item.place)


class _InFlight:
    """The keys whose place a step in flight may read, as the container that a policy asks."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return not self._cache.quiet(self._cache._place_of[key])
