"""The host arena as a cache over the pack.

Three rules hold whatever happens to its places (`ziggurat.residency.host_places`):

* a key is findable only after its bytes arrived and were verified, so a failed read never becomes a hit;
* rows that only a scan wants (weight 0) fill free places and never evict, nor is anything evicted that was fixed;
  until somebody uses them they give way to rows that are hotter;
* a place that a step in flight may still read is not written to before that step's epoch is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ziggurat.residency.host_places import HostPlaces
from ziggurat.residency.host_rows import ArrivedRow, FillReport, Reservation, RowBatch, RowFault, Source
from ziggurat.residency.policies.base import NO_IDS
from ziggurat.residency.runtime_errors import HostCacheError
from ziggurat.stores.pack import RowRequest

__all__ = ["ArrivedRow", "FillReport", "HostCache", "RowBatch", "RowFault", "Source"]


class HostCache(HostPlaces):
    """Serves rows by key, from the arena or from the pack through it. Safe for one step and for threads that fill.

    arena: all its places belong to this object. policy: empty; holds the keys that can be found. See `HostPlaces`.
    """

    def rows(
        self,
        wanted: Mapping[int, float],
        *,
        epoch: int,
        keep: bool = True,
        insist: bool = False,
        reclaim: Callable[[], bool] = lambda: False,
    ) -> Generator[RowBatch, None, None]:
        """Every wanted row once, in batches, found ones first, then as reads complete.

        wanted: key -> weight (0 = wanted by a scan only). keep=False: read without caching. insist: what only a scan
        wants may evict, too; it leaves first all the same. A key whose read failed is in a batch's `faults` and is not
        tried again here. Settle each batch before asking for the next one if the copy out of it is complete by then;
        otherwise its places stay in use until the epoch closes, or until `reclaim` settles what it can, which is called
        when places are short and returns whether it did anything.

        HostCacheError if every place is in use by the asking step itself.
        """
        remaining = dict(wanted)
        while remaining:
            found = self._find(remaining, epoch)
            if found.rows:
                yield found
            if not remaining:
                return
            plan = self._reserve(remaining, epoch, keep, insist)
            if plan is None:
                if not reclaim():
                    raise HostCacheError(
                        f"all {self._arena.places} places of the host arena are in use by this very step; raise "
                        "tiers.host.size, or settle batches once they have been copied"
                    )
                continue
            if plan:
                with self._reading_for_a_step():
                    yield from self._read(plan, remaining, epoch)
                if remaining:
                    reclaim()

    def fill(self, wanted: Iterable[tuple[int, float]], limit: int) -> FillReport:
        """Read up to `limit` of the wanted (key, heat) rows that are not here yet into free places; for a
        background thread. Never evicts, never uses staging, never waits for a step."""
        plan: list[Reservation] = []
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
                plan.append(Reservation(key, heat, self._free.pop()))
        return self._read_ahead(plan, report)

    def promote(
        self,
        wanted: Sequence[tuple[int, float]],
        heat_of: Callable[[int], float],
        limit: int,
        *,
        displaces_used: bool = True,
    ) -> FillReport:
        """Read up to `limit` of the wanted (key, heat) rows, hottest first, in the place of colder ones; for a
        background thread. `full` in the report: not all of these found a place that may be written to by now.

        displaces_used: whatever the policy would evict; otherwise the coldest of those that nobody has used since they
        came, by their heat.
        """
        with self._changed:
            self._rest()
            absent = [
                (key, heat) for key, heat in wanted if key not in self._place_of and key not in self._reading
            ][:limit]
            short = absent[len(self._free) + len(self._between()) :]
            unused = [] if displaces_used else self._coldest_unused(len(short), heat_of)
            for _, heat in short:
                victim = self._displaced(unused, displaces_used)
                if victim is None or heat_of(victim) >= heat:
                    break
                del unused[:1]
                self._retire(victim)
            self._rest()
        return self.fill(absent, limit)

    def _displaced(self, unused: Sequence[int], displaces_used: bool) -> int | None:
        """The key that makes room for a hotter one."""
        if not self._may_evict():
            return None
        return self.policy.victim(self._busy()) if displaces_used else next(iter(unused), None)

    def read_early(self, keys: Iterable[int], spare: int) -> FillReport:
        """Read rows that a scan is about to ask for, as many as there are idle staging places, all but `spare` of
        them; for a background thread. They fill free places, as the scan's own do, or wait in these staging places
        until they are asked for, or the place is, or `forget_early`."""
        plan: list[Reservation] = []
        report = FillReport()
        with self._changed:
            idle = self._staging.idle(self.quiet)
            for key in keys:
                if key in self._place_of or key in self._reading or key in self._staging:
                    continue
                if key in self._passing:  # what comes next may have been said before somebody came to it
                    continue
                free = bool(self._free) and idle > spare
                place = self._free.pop() if free else None
                if place is None and idle > spare:
                    place = self._staging.take(self.quiet, give_up=False)
                if place is None:
                    report.full = True
                    break
                idle -= 1
                self._reading.add(key)
                plan.append(Reservation(key, 0.0, place, "cache" if free else "early"))
        return self._read_ahead(plan, report)

    def forget_early(self) -> None:
        """Nobody will ask for the rows that wait."""
        with self._changed:
            self._staging.clear()
            self._changed.notify_all()

    def wait_until_idle(self, stopped: Callable[[], bool]) -> None:
        """Until no step reads from the pack, or `stopped` says so; see `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: stopped() or not self._foreground)

    def fix(self, keys: Sequence[int]) -> dict[int, int]:
        """Read rows that stay where they are for good; before anything else has used the cache. Their places.

        HostCacheError if they are more than the free places, or if one of them cannot be read.
        """
        with self._changed:
            found = [key for key in keys if key in self._place_of]  # adopted
            for key in found:
                self.policy.remove(key)
                self._unused.discard(key)
            absent = [key for key in keys if key not in self._place_of]
            while len(self._free) < len(absent) and (victim := self._victim()) is not None:
                self._free.append(self._unbind(victim))
            if len(absent) > len(self._free):
                raise HostCacheError(
                    f"{len(absent)} rows want a place for good, and the host arena has {len(self._free)} beside those"
                    " for reads in flight; raise tiers.host.size, or take layers out of tiers.device.direct_layers"
                )
            plan = [Reservation(key, 0.0, self._free.pop()) for key in absent]
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

    @contextmanager
    def _reading_for_a_step(self) -> Iterator[None]:
        with self._changed:
            self._foreground += 1
        try:
            yield
        finally:
            with self._changed:
                self._foreground -= 1
                self._changed.notify_all()

    def _read_ahead(self, plan: Sequence[Reservation], report: FillReport) -> FillReport:
        unused: dict[int, float] = {item.key: 0.0 for item in plan}
        for batch in self._read(plan, unused, epoch=0, seed=True) if plan else ():
            report.read += len(batch.rows)
            report.seconds += [row.seconds for row in batch.rows]
            report.faults += batch.faults
        return report

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
                    self._asked_for(key)
                    if weight > 0.0:
                        self._used(key)
                batch.rows.append(self._arrived(key, place, "arena", 0.0, epoch))
            for key in [key for key in remaining if key in self._staging]:
                del remaining[key]
                self.ahead_used += 1
                batch.rows.append(self._arrived(key, self._staging.find(key), "pack", 0.0, epoch))
        return batch

    def _reserve(
        self, remaining: Mapping[int, float], epoch: int, keep: bool, insist: bool
    ) -> list[Reservation] | None:
        """Places for as many of the remaining keys as there is room for; waits if there is none right now.

        Empty if another thread has brought a remaining key in the meantime; None if only the asking step itself
        can make room.
        """
        waited = False
        with self._changed:
            while True:
                plan = self._plan(remaining, keep, insist)
                self._reading.update(item.key for item in plan if item.role == "cache")
                self._passing.update(item.key for item in plan if item.role == "staging")
                if plan:
                    return plan
                if any(key in self._place_of or key in self._staging for key in remaining):
                    return []
                if not self._reading and self._open_epochs <= {epoch}:
                    return None
                if not waited:
                    waited = True
                    self.waits += 1
                    self._changed.notify_all()
                self._changed.wait()

    def _read(
        self, plan: Sequence[Reservation], remaining: dict[int, float], epoch: int, *, seed: bool = False
    ) -> Iterator[RowBatch]:
        arrived: set[int] = set()
        pending = {item.key for item in plan}
        requests = [
            RowRequest(
                *divmod(item.key, self._experts), self._arena.view(item.place), sole=item.role == "cache"
            )
            for item in plan
        ]
        places = {item.key: item.place for item in plan}
        for item in plan:
            if item.role == "cache" and self._ledger is not None:
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
