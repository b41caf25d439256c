"""The host arena as a cache that a device reads by itself.

The device has a table `places`: where in the arena each row is. The host writes it in stream order before a pass, so a
pass reads what was found there when it was launched. A place that loses its row is written to again only when every
pass that was launched before has finished on the device; passes that are launched later have been shown a table
without it. Nobody waits for that: the place rests until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.admission import ABSENT
from ziggurat.residency.host_cache import FillReport, HostCache
from ziggurat.residency.ledger import Ledger
from ziggurat.residency.policies.base import EvictionPolicy
from ziggurat.residency.ports import RowArena, RowPack

Show = Callable[[npt.NDArray[np.int32], int], None]
"""Called with `places` int32 [L * E] and its version; what it is given may change when it returns."""


@dataclass(slots=True)
class Brought:
    """Rows that were asked for: those that can be found now; and what reading them took."""

    arrived: list[int] = field(default_factory=list)
    report: FillReport = field(default_factory=FillReport)


class InlineCache(HostCache):
    """A HostCache with a table of places for the device. One stepping thread launches passes and reads rows; other
    threads may fill, promote and retire.

    version: changes with every change of `places`.
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
        self._rows = pack.header.layers * experts
        # Before the rows that are there already are found.
        self._places: npt.NDArray[np.int32] = np.full(self._rows, ABSENT, dtype=np.int32)
        self.version = 0
        super().__init__(pack, arena, policy, experts=experts, staging=staging, ledger=ledger)
        self._resting: list[int] = []
        self._passes: set[int] = set()  # epochs of passes that have not finished
        self._kept: Collection[int] = ()  # keys that one step needs together

    @property
    def full(self) -> bool:
        """Whether every row of the model is here."""
        return self.used == self._rows

    # -- passes ------------------------------------------------------------------------------------------------

    def launch(self, show: Show) -> int:
        """A pass is about to be launched: `show` it the places, in stream order. Its epoch, to be closed when the
        device has finished it."""
        with self._changed:
            self._learn()
            self._last_epoch += 1
            self._open_epochs.add(self._last_epoch)
            self._passes.add(self._last_epoch)
            show(self._places, self.version)
            self._changed.notify_all()
            return self._last_epoch

    def show(self, show: Show) -> None:
        """Places have changed since the last launch, and another pass of the same epoch is about to come."""
        with self._changed:
            show(self._places, self.version)

    def close_epoch(self, epoch: int) -> None:
        with self._changed:
            self._open_epochs.discard(epoch)
            self._passes.discard(epoch)
            self._rest()
            self._changed.notify_all()

    @property
    def resting(self) -> int:
        """Places that hold no row and that a pass in flight may still read."""
        return len(self._resting)

    # -- rows --------------------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[int], weights: Iterable[float]) -> None:
        """Rows that a device has read, weight 0 for a prompt only; those that have left meanwhile are passed over."""
        with self._changed:
            for key, weight in zip(keys, weights, strict=True):
                if key in self._place_of:
                    self.policy.touch(key, weight)
                    if weight > 0.0:
                        self._used(key)

    def beside(
        self, missed: int, used: npt.NDArray[np.int64], pooled: npt.NDArray[np.bool_]
    ) -> frozenset[int] | None:
        """Which rows must not leave for `missed` others, so that a pass that used them finds them here once more.

        used: keys that the pass was routed to, [N]. pooled: those of them that have a slot now, bool [N], so that most
        will be found there. All that are here stay if there is room for that, else those without a slot. None: there is
        none for these either.
        """
        with self._changed:
            here = self._places[used] != ABSENT
            if self._fixed:
                here &= np.isin(used, list(self._fixed), invert=True)
            room = self.capacity - len(self._fixed) - missed
            for chosen in (here, here & ~pooled):
                if np.count_nonzero(chosen) <= room:
                    return frozenset(used[chosen].tolist())
        return None

    def bring(self, wanted: Mapping[int, float], *, epoch: int, keep: Collection[int] = ()) -> Brought:
        """Read rows into the arena, evicting others; for the stepping thread, between passes. Until `let_go` none of
        these leaves, nor one of `keep`.

        wanted: key -> weight; also what only a prompt wants (0) is brought, since the device can read it from nowhere
        else, but it leaves first. Rows for which there is no place do not arrive; nor do those that cannot be read.
        """
        brought = Brought()
        with self._changed:
            self._kept = {*wanted, *keep}
        for batch in self.rows(wanted, epoch=epoch, insist=True):
            self.settle(batch)
            read = [row for row in batch.rows if row.source == "pack"]
            brought.report.read += len(read)
            brought.report.seconds += [row.seconds for row in read]
            brought.report.faults += batch.faults
        brought.arrived = [key for key in wanted if self.holds(key)]
        return brought

    def let_go(self) -> None:
        """The step that brought rows needs them no more."""
        with self._changed:
            self._kept = ()

    def retire(self, keys: Iterable[int]) -> int:
        """Evict rows, except those that are being copied out of, and fixed ones. How many have left."""
        left = 0
        with self._changed:
            for key in keys if self._may_evict() else ():
                if key in self._place_of and key not in self._fixed and self.quiet(self._place_of[key]):
                    self._retire(key)
                    left += 1
            self._rest()
        return left

    def wait_for_place(self, stopped: Callable[[], bool]) -> None:
        """Until no place rests, or `stopped` says so; see `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: stopped() or not self._resting)

    def wait_for_pass(self, last: int, stopped: Callable[[], bool]) -> int:
        """Until a pass or step has begun after the one of epoch `last`, or `stopped` says so; its epoch."""
        with self._changed:
            self._changed.wait_for(lambda: stopped() or self._last_epoch > last)
            return self._last_epoch

    # -- what HostCache asks -----------------------------------------------------------------------------------

    def _victim(self) -> int | None:
        """Nothing while passes run: what they may read cannot be written to, so a read goes through staging."""
        return None if self._passes else super()._victim()

    def _busy(self) -> Container[int]:
        return _Busy(self)

    def _bind(self, key: int, place: int) -> None:
        super()._bind(key, place)
        self._places[key] = place
        self.version += 1

    def _unbind(self, key: int) -> int:
        self._places[key] = ABSENT
        self.version += 1
        return super()._unbind(key)

    def _between(self) -> list[int]:
        return self._resting

    def _retire(self, key: int) -> None:
        place = self._unbind(key)
        self._readers[place] += self._passes
        self._resting.append(place)

    def _rest(self) -> None:
        """Places that no pass can read any more are free."""
        if self._resting:
            self._free += [place for place in self._resting if self.quiet(place)]
            self._resting = [place for place in self._resting if not self.quiet(place)]


class _Busy:
    """The keys that may not be evicted: copied out of, or needed by the step that the one in need of room is for."""

    def __init__(self, cache: InlineCache) -> None:
        self._cache = cache

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        cache = self._cache
        return key in cache._kept or not cache.quiet(cache._place_of[key])
