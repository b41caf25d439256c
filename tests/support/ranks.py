"""Several tensor-parallel ranks in one process: a thread each, and collectives that notice when ranks diverge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class DivergedError(RuntimeError):
    """Ranks made different collective calls, or one left while another waited: a hang on real hardware."""


class ThreadGroup:
    """Collectives between `size` threads. A call that can never complete raises instead of waiting for ever."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._items: list[Any] = [None] * size
        self._calls: list[str] = [""] * size
        self._result: list[Any] = []
        self._arrived = 0
        self._generation = 0
        self._gone = False

    def exchange(self, rank: int, call: str, item: Any) -> list[Any]:
        """Everyone's item in rank order. `call` must be the same on every rank."""
        with self._changed:
            generation = self._generation
            self._items[rank], self._calls[rank] = item, call
            self._arrived += 1
            if self._arrived == self.size:
                if len(set(self._calls)) > 1:
                    self._gone = True
                else:
                    self._result = list(self._items)
                    self._arrived = 0
                    self._generation += 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._generation > generation or self._gone)
            if self._generation == generation:
                raise DivergedError(f"rank {rank} waits in {call!r}; the ranks are in {self._calls}")
            return self._result

    def leave(self) -> None:
        """A rank is done: whoever waits for it from now on waits in vain."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()


class ThreadConsensus:
    """`ziggurat.residency.consensus.Consensus` over a ThreadGroup; counts its calls."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size
        self.sums = 0
        self.gathers = 0

    def sum(self, value: int) -> int:
        self.sums += 1
        return sum(self.group.exchange(self.rank, "sum", value))

    def gather(self, item: Any) -> list[Any]:
        self.gathers += 1
        return self.group.exchange(self.rank, "gather", item)

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The model's own collective: the sum over ranks, added in rank order."""
        parts: list[torch.Tensor] = self.group.exchange(self.rank, "all_reduce", value)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


class RankResults(Generic[T]):
    """What each rank returned, or raised."""

    def __init__(self, size: int) -> None:
        self.values: list[T | None] = [None] * size
        self.errors: list[BaseException | None] = [None] * size

    def all(self) -> list[T]:
        """The values; re-raises the first error that is not the mere echo of another rank's."""
        errors = [error for error in self.errors if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, DivergedError)), errors[0])
        return self.values  # type: ignore[return-value]  # no error: every rank has returned a value


def run_ranks(size: int, work: Callable[[ThreadConsensus], T]) -> RankResults[T]:
    """Run `work` once per rank, each in its own thread with its own consensus."""
    group = ThreadGroup(size)
    results: RankResults[T] = RankResults(size)

    def run(rank: int) -> None:
        try:
            results.values[rank] = work(ThreadConsensus(group, rank))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results.errors[rank] = error
        finally:
            group.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
