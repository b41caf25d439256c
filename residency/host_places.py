"""The books of the host arena: what is in which place, who may read it, what may leave.

A place of the arena holds one row. Most places are cache: a key is found there until another row needs the place.
A few places are staging: rows that may not displace anything pass through them, and the place is free again as soon
as the row has been copied on.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Container, Iterable, Mapping

from ziggurat.residency.host_rows import ArrivedRow, Reservation, RowBatch, Source
from ziggurat.residency.ledger import Ledger
from ziggurat.residency.policies.base import EvictionPolicy
from ziggurat.residency.ports import RowArena, RowPack
from ziggurat.residency.runtime_errors import HostCacheError
from ziggurat.residency.staging_places import StagingPlaces
from ziggurat.stores.counts import PackCounts


class HostPlaces:
    """Places of an arena over a pack. Public members may be used by any thread; the others under the lock `_changed`.

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
        self.ahead_used = 0  # rows that were read before anybody asked for them, and then asked for
        self.waits = 0  # requests that found no place and had to wait for another thread or step
        self._pack = pack
        self._arena = arena
        self._experts = experts
        self._changed = threading.Condition()
        self._place_of: dict[int, int] = {}
        self._ledger = ledger
        self._free = list(range(arena.places - 1, self.staging - 1, -1))
        self._staging = StagingPlaces(range(self.staging))
        self._ahead: set[int] = set()  # found keys that were read ahead and that nobody has asked for
        self._unused: set[int] = set()  # found keys that nobody has used since they came: those, and scans'
        self._foreground = 0  # requests that read from the pack at this moment
        self._fixed: set[int] = set()  # keys whose places are theirs for good; the policy does not know them
        self._reading: set[int] = set()  # keys on their way into a cache place
        self._passing: set[int] = (
            set()
        )  # keys on their way through a staging place, to somebody who waits for them
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

    @property
    def replaceable(self) -> bool:
        """Whether the pack has rows that are not here, and there is a free place or one whose row nobody has used."""
        header = self._pack.header
        evictable = self._unused if self._may_evict() else ()
        return bool(self._free or evictable) and self.used < header.layers * header.experts

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
                    self._unused.add(key)

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

    def wake(self) -> None:
        """Have those who wait ask again."""
        with self._changed:
            self._changed.notify_all()

    def held(self) -> list[int]:
        """Keys of all rows that can be found."""
        with self._changed:
            return list(self._place_of)

    def check(self) -> None:
        """HostCacheError unless every place has exactly one role, with no read in progress. For tests."""
        with self._changed:
            roles = [*self._free, *self._staging.places(), *self._place_of.values(), *self._between()]
            places = range(self._arena.places)
            # Of shared places some may be lost, and a reader has a role for published ones only.
            each = sorted(roles) == list(places) if self._ledger is None else len(set(roles)) == len(roles)
            if not each or not set(roles) <= set(places) or self._reading:
                raise HostCacheError(
                    f"places {sorted(roles)} have a role, rows {self._reading} are being read"
                )
            if set(self.policy.order()) != set(self._place_of) - self._fixed:
                raise HostCacheError("the policy holds other keys than can be found")
            if not self._ahead <= self._unused <= self._place_of.keys():
                raise HostCacheError("rows count as unused that cannot be found")

    def _between(self) -> list[int]:
        """Places that hold no row and may not be written to yet."""
        return []

    def _rest(self) -> None:
        """Have those of them that may be written to by now be free."""

    def _busy(self) -> Container[int]:
        """Keys that may not leave."""
        return _InFlight(self)

    def _retire(self, key: int) -> None:
        """Evict a key; its place is free as soon as that may be."""
        self._free.append(self._unbind(key))

    def _coldest_unused(self, count: int, heat_of: Callable[[int], float]) -> list[int]:
        busy = self._busy()
        ranked = heapq.nsmallest(count, ((heat_of(key), key) for key in self._unused if key not in busy))
        return [key for _, key in ranked]

    def _used(self, key: int) -> None:
        """Somebody but a scan wanted a row that can be found."""
        self._unused.discard(key)
        self._asked_for(key)

    def _asked_for(self, key: int) -> None:
        """Somebody wanted it, a scan or not."""
        if key in self._ahead:
            self._ahead.remove(key)
            self.ahead_used += 1

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

    def _victim(self) -> int | None:
        """A key whose place may be written to at once."""
        return self.policy.victim(self._busy()) if self._may_evict() else None

    def _bind(self, key: int, place: int) -> None:
        """The row of `key` is in `place` from now on."""
        self._place_of[key] = place

    def _unbind(self, key: int) -> int:
        """Evict a key; its place."""
        self.policy.remove(key)
        self._unused.discard(key)
        self._ahead.discard(key)
        self.evictions += 1
        place = self._place_of.pop(key)
        if self._ledger is not None:
            self._ledger.vacate(place)
        return place

    def _plan(self, remaining: Mapping[int, float], keep: bool, insist: bool) -> list[Reservation]:
        """Places for remaining keys, in their order, as far as there are any.

        Whoever may evict is asked until there is nothing to evict, and then no more: that answer may take a look at
        every row in flight, and it is the same for the keys that follow.
        """
        plan: list[Reservation] = []
        caches = keep or not self.staging
        evicts = caches
        stages = True
        for key, weight in remaining.items():
            if key in self._reading or key in self._place_of or key in self._staging:
                continue  # brought by another thread since we looked, or about to be
            place = self._free.pop() if caches and self._free else None
            if place is None and evicts and (insist or weight > 0.0):
                victim = self._victim()
                if victim is None:
                    evicts = False
                else:
                    place = self._unbind(victim)
            if place is not None:
                plan.append(Reservation(key, weight, place))
                continue
            place = self._staging.take(self.quiet) if stages else None
            if place is not None:
                plan.append(Reservation(key, weight, place, "staging"))
            elif not evicts:
                break
            else:
                stages = False
        return plan

    def quiet(self, place: int) -> bool:
        """No step in flight may read the place."""
        return self._open_epochs.isdisjoint(self._readers[place])

    def _publish(self, item: Reservation, seed: bool) -> None:
        if item.role == "staging":
            self._passing.discard(item.key)
            self._staging.give(item.place)
            return
        self._reading.discard(item.key)
        if item.role == "early":
            self._staging.keep(item.key, item.place)
            return
        if self._ledger is not None:
            self._ledger.publish(item.place, item.key)
        self._bind(item.key, item.place)
        if item.key in self._fixed:
            return
        if seed:
            self.policy.seed(item.key, item.weight)
            self._ahead.add(item.key)
        else:
            self.policy.insert(item.key, item.weight)
        if seed or item.weight <= 0.0:
            self._unused.add(item.key)

    def _release(self, item: Reservation) -> None:
        if item.role == "cache":
            self._free.append(item.place)
            if self._ledger is not None:
                self._ledger.vacate(item.place)
        else:
            self._staging.give(item.place)
        if item.role == "staging":
            self._passing.discard(item.key)
        else:
            self._reading.discard(item.key)


class _InFlight:
    """The keys whose place a step in flight may read, as the container that a policy asks."""

    def __init__(self, cache: HostPlaces) -> None:
        self._cache = cache

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return not self._cache.quiet(self._cache._place_of[key])
