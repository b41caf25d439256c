"""A host cache over a real pack, every row of which is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from support.fake_moe import FakePacks
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pageable import PageableArena
from ziggurat.residency.host_cache import HostCache, RowBatch
from ziggurat.residency.policies.registry import make_policy
from ziggurat.stores.pack import RowRequest

ROWS = 48


class Rig:
    """A cache over a real pack; its arena is full of NaN bytes."""

    def __init__(self, packs: FakePacks, places: int, staging: int, policy: str = "lru") -> None:
        self.pack = WrappedPack(packs.open())
        self.arena = PageableArena(places, self.pack.header.stride)
        self.arena.tensor.fill_(0xFF)
        self.cache = HostCache(
            self.pack, self.arena, make_policy(policy), experts=packs.geometry.experts, staging=staging
        )
        self.truth = read_all(packs)

    def get(self, keys: Iterable[int], weight: float = 1.0, **options: Any) -> dict[int, str]:
        """Read and settle rows, checking every byte; key -> source, or the reason of its failure."""
        epoch = self.cache.open_epoch()
        found: dict[int, str] = {}
        for batch in self.cache.rows(dict.fromkeys(keys, weight), epoch=epoch, **options):
            self.check(batch)
            found |= {row.key: row.source for row in batch.rows}
            found |= {fault.key: fault.reason for fault in batch.faults}
            self.cache.settle(batch)
        self.cache.close_epoch(epoch)
        self.cache.check()
        return found

    def check(self, batch: RowBatch) -> None:
        for row in batch.rows:
            assert torch.equal(row.row, self.truth[row.key]), f"row {row.key} has foreign bytes"


def read_all(packs: FakePacks) -> torch.Tensor:
    """Every row of the pack, uint8 [ROWS, stride]."""
    pack = packs.open()
    arena = PageableArena(ROWS, pack.header.stride)
    wanted = [RowRequest(*packs.geometry.split(key), arena.view(key)) for key in range(ROWS)]
    assert all(result.error is None for result in pack.read_rows(wanted))
    pack.close()
    return arena.tensor
