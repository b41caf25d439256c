"""Rows that come and go in the arena while steps run: for tests of that."""

from __future__ import annotations

import random
from types import TracebackType

from ziggurat.residency.background import CacheThread
from ziggurat.residency.inline.cache import InlineCache


class ArenaChurn(CacheThread):
    """A thread that evicts random rows from the arena and reads random ones into it, once for each pass that begins.

    It goes the ways of everyday work, `InlineCache.retire` and `.fill`; so steps must not notice, but for rows that
    they find missing. most: rows that leave or come at a time. evicted, filled: rows so far. error: what ended it.
    Used in a `with` statement: ended, joined, and its error raised, at the end.
    """

    def __init__(self, cache: InlineCache, rows: int, *, seed: int = 0, most: int = 4) -> None:
        super().__init__("ziggurat-churn", cache)
        self._cache = cache
        self._rows = rows
        self._random = random.Random(seed)
        self._most = most
        self.evicted = 0
        self.filled = 0
        self.error: BaseException | None = None
        self._epoch = 0

    def __enter__(self) -> ArenaChurn:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self.error is not None and error is None:
            raise self.error

    def _work(self) -> None:
        try:
            while self._next_pass() and self._begin():
                try:
                    self._turn()
                finally:
                    self._end()
        except BaseException as error:  # noqa: BLE001  # raised where the thread is joined
            self.error = error

    def _next_pass(self) -> bool:
        """Wait for a pass that has not been disturbed yet, outside of any portion of work."""
        self._epoch = self._cache.wait_for_pass(self._epoch, lambda: self._stop)
        return not self._stop

    def _turn(self) -> None:
        held = self._cache.held()
        self.evicted += self._cache.retire(self._some(held))
        absent = sorted(set(range(self._rows)).difference(held))
        self.filled += self._cache.fill([(key, 1.0) for key in self._some(absent)], self._most).read

    def _some(self, keys: list[int]) -> list[int]:
        return self._random.sample(keys, min(self._random.randint(0, self._most), len(keys)))
