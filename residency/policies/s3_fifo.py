"""S3-FIFO: three queues, of which a small one sorts out what is used only once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy

SMALL_PERCENT = 10
_MOST = 3  # uses are counted no further


class S3FifoPolicy(ColdFirstPolicy):
    """New keys enter a small queue of a tenth of the capacity. At its end those that were used more than once move to
    the main queue and the others leave; the main queue gives a key as many further rounds as it was used, three at
    most. A key that comes back soon after it left enters the main queue at once. (Yang et al., SOSP 2023.)
    """

    name = "s3-fifo"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._small: OrderedDict[int, None] = OrderedDict()  # all: oldest first
        self._main: OrderedDict[int, None] = OrderedDict()
        self._left: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def _admit(self, key: int) -> None:
        self._uses[key] = 0
        if key in self._left:
            del self._left[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def _use(self, key: int) -> None:
        if self._uses[key] < _MOST:
            self._uses[key] += 1

    def _drop(self, key: int) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._left[key] = None
        while len(self._left) > self.capacity:
            self._left.popitem(last=False)

    def _choose(self, blocked: Container[int]) -> int | None:
        full = max(1, self.capacity * SMALL_PERCENT // 100)
        while len(self._small) >= full:
            key = self._oldest_small(blocked)
            if key is None:
                break
            if self._uses[key] <= 1:
                return key
            del self._small[key]
            self._main[key] = None
            self._uses[key] = 0
        found = self._from_main(blocked)
        return self._oldest_small(blocked) if found is None else found

    def _oldest_small(self, blocked: Container[int]) -> int | None:
        return next((key for key in self._small if key not in blocked), None)

    def _from_main(self, blocked: Container[int]) -> int | None:
        for _ in range((_MOST + 1) * len(self._main)):
            key = next(iter(self._main))
            if key not in blocked:
                if self._uses[key] == 0:
                    return key
                self._uses[key] -= 1
            self._main.move_to_end(key)
        return None
