"""Rows that come and go in the arena while steps run: for tests of that."""

from __future__ import annotations

import random
from types import TracebackType

from ziggurat.residency.background import BackgroundThread
from ziggurat.residency.inline.cache import InlineCache


class ArenaChurn(BackgroundThread):
    """A thread that evicts random rows from the arena and reads random ones into it, without a rest.

    It goes the ways of everyday work, `InlineCache.retire` and `.fill`; so steps must not notice, but for rows that
    they find missing. most: rows that leave or come at a time. evicted, filled: rows so far. error: what ended it.
    Used in a `with` statement: ended, joined, and its error raised, at the end.
    """

    def __init__(self, cache: InlineCache, rows: int, *, seed: int = 0, most: int = 4) -> None:
        super().__init__("ziggurat-churn")
        self._cache = cache
        self._rows = rows
        self._random = random.Random(seed)
        self._most = most
        self.evicted = 0
        self.filled = 0
        self.error: BaseException | None = None

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
            while self._begin():
                try:
                    self._turn()
                finally:
                    self._end()
        except BaseException as error:  # noqa: BLE001  # raised where the thread is joined
            self.error = error

    def _turn(self) -> None:
        held = self._cache.held()
        count = self._random.randint(0, self._most)
        self.evicted += self._cache.retire(self._random.sample(held, min(count, len(held))))
        wanted = [(self._random.randrange(self._rows), 1.0) for _ in range(self._random.randint(0, self._most))]
        self.filled += self._cache.fill(wanted, self._most).read
