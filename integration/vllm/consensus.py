"""Agreement between tensor-parallel ranks over vLLM's CPU group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class TensorParallelConsensus:
    """Reduces over a group of ranks; every rank must make the same calls in the same order.

    group: vLLM's CPU process group of the tensor-parallel ranks (gloo).
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def sum(self, value: int) -> int:
        """Sum of ``value`` over the ranks."""
        cell = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(cell, group=self._group)
        return int(cell[0])

    def max(self, value: int) -> int:
        """Largest ``value`` over the ranks."""
        cell = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(cell, op=dist.ReduceOp.MAX, group=self._group)
        return int(cell[0])

    def gather(self, item: Any) -> list[Any]:
        """``item`` of every rank, in rank order."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._group)
        return items
