"""A pool whose copies happen as late as the contract of `RowPool` allows, and that notices when that was too late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ziggurat.allocators.pool import CpuPool, check_write


@dataclass
class _Copy:
    slot: int
    row: torch.Tensor
    bytes: torch.Tensor  # what the row held when the copy was asked for


class DelayedPool(CpuPool):
    """Copies read their rows at `ready`, which is when the work behind them could begin, and once more when the host
    has reason to know that they are complete. A row that has changed by then was given away too early.

    writes: rows of each `write`. drains: calls of `drain`. ordered: copies that the current stream waits for.
    """

    asynchronous = True

    def __init__(self, slots: int, stride: int) -> None:
        super().__init__(slots, stride)
        self.writes: list[int] = []
        self.drains = 0
        self.ordered = 0
        self._queued: list[_Copy] = []
        self._started: list[_Copy] = []
        self._complete = 0

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        check_write(slots, rows, count=self.slots, stride=self.stride)
        self.writes.append(len(slots))
        self._queued += [_Copy(slot, row, row.clone()) for slot, row in zip(slots, rows, strict=True)]

    def ready(self) -> None:
        for copy in self._queued:
            self.tensor[copy.slot].copy_(copy.row)
        self._started += self._queued
        self.ordered += len(self._queued)
        self._queued.clear()

    def drain(self) -> None:
        self.drains += 1
        self.ready()
        self.passed(self.ordered)

    def passed(self, copies: int) -> None:
        """The host has waited for work behind the first `copies` copies."""
        while self._complete < copies:
            copy = self._started.pop(0)
            self._complete += 1
            assert torch.equal(copy.row, copy.bytes), (
                f"the row for slot {copy.slot} changed before it was copied"
            )

    def close(self) -> None:
        assert not self._queued, "closed with copies under way"
        assert not self._started, "closed with copies under way"
        super().close()


class DelayedEvent:
    """An event of the stream whose work follows the pool's `ready`."""

    def __init__(self, pool: DelayedPool) -> None:
        self._pool = pool
        self._behind = 0

    def record(self) -> None:
        self._behind = self._pool.ordered

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._pool.passed(self._behind)
