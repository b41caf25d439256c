"""All that a service reads into its arena before somebody waits for it, and the threads that do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ziggurat.residency.account import Account
from ziggurat.residency.background import BackgroundThread
from ziggurat.residency.heat import HeatMap
from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.preheat import Preheater
from ziggurat.residency.read_ahead import EarlyReader, HeatReader
from ziggurat.residency.slots import ABSENT, SlotPool


class ReadingAhead:
    """At the start by the heat of earlier runs, then by the heat of this one, and ahead of streamed passes.

    batch: rows read at a time by the first two.
    """

    def __init__(
        self, cache: HostCache, slots: SlotPool, heat: HeatMap, account: Account, *, batch: int
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._heat = heat
        self._account = account
        self._batch = batch
        self._preheater: Preheater | None = None
        self._by_heat = HeatReader(
            cache,
            self.hottest,
            lambda key: float(heat.counts.reshape(-1)[key]),
            batch,
            lambda report: account.filled(report, "heat"),
        )
        # One place at least for those who wait; with one in all, nothing is read early.
        spare = max(1, cache.staging // 2)
        self._early = EarlyReader(cache, spare, lambda report: account.read_ahead("layers", report.read))
        self.upcoming = self._early.want

    @property
    def threads(self) -> list[BackgroundThread]:
        """To be held during a capture."""
        found: list[BackgroundThread] = [self._by_heat, self._early]
        return found if self._preheater is None else [self._preheater, *found]

    def preheat(self, order: Sequence[tuple[int, float]]) -> None:
        """Fill free places with rows (key, heat) in this order, in the background."""
        if self._preheater is not None:
            self._preheater.close()
        self._preheater = Preheater(
            self._cache,
            order,
            self._batch,
            lambda report: self._account.filled(report, "start"),
            self._account.preheating,
        )
        self._preheater.start()

    def preheated(self) -> None:
        """Wait until that is done."""
        if self._preheater is not None:
            self._preheater.wait()

    def passed(self, steps: int) -> None:
        """Steps of the model have passed."""
        self._by_heat.passed(steps)

    def hottest(self, count: int) -> list[tuple[int, float]]:
        """Up to `count` (key, heat) of rows that neither pool nor arena has, hottest first. Heat may change while it is
        looked at: it is a guess anyway."""
        heat = np.where(self._slots.table.numpy == ABSENT, self._heat.counts, 0.0).reshape(-1)
        heat[self._cache.held()] = 0.0
        count = min(count, heat.size)
        first = np.argpartition(-heat, count - 1)[:count]
        ranked = first[np.lexsort((first, -heat[first]))]
        return [(key, float(heat[key])) for key in ranked.tolist() if heat[key] > 0.0]

    def close(self, timeout: float | None = None) -> None:
        """End the threads and join each, for at most `timeout` seconds."""
        for thread in self.threads:
            thread.close(timeout)
