"""Pool and arena that several services use one after the other: a large arena takes a minute to lock."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bench.harness.measure import Tiers
from bench.harness.rows import MemoryPack
from bench.shapes import MoeShape
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.consensus import LocalConsensus
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.placement import map_arena, open_arena, open_kernels, open_pool, open_ring
from ziggurat.residency.ports import LayerKernels, RowArena, RowPool
from ziggurat.residency.service import ExpertService
from ziggurat.residency.streaming.sizing import auto_rows, ring_of

READERS = 8
"""Staging places of a service's arena, the default of tiers.disk.readers."""


class _LentArena:
    """An arena that stays open when its borrower closes it."""

    def __init__(self, arena: RowArena, places: int) -> None:
        self._arena = arena
        self.places = places
        self.stride = arena.stride
        self.tensor = arena.tensor[:places]

    def view(self, place: int) -> memoryview:
        return self._arena.view(place)

    def close(self) -> None:
        """The lender does."""


class _LentPool:
    """The first slots of a pool, which stays open when its borrower closes it."""

    def __init__(self, pool: RowPool, slots: int) -> None:
        self._pool = pool
        self.slots = slots
        self.stride = pool.stride
        self.device = pool.device
        self.tensor = pool.tensor[:slots]

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        self._pool.write(slots, rows)

    def ready(self) -> None:
        self._pool.ready()

    def drain(self) -> None:
        self._pool.drain()

    def row(self, slot: int) -> torch.Tensor:
        return self._pool.row(slot)

    def close(self) -> None:
        """The lender does."""


class SharedMemory:
    """A pool with a slot for every row and an arena with a place for every row, for services of one shape.

    max_tokens: of the largest step of any of them.
    """

    def __init__(self, shape: MoeShape, pack: MemoryPack, device: torch.device, max_tokens: int) -> None:
        self.shape = shape
        self.pack = pack
        self.device = device
        self._max_tokens = max_tokens
        self._place = Tiers(shape.rows, shape.rows, device, max_tokens).place
        stride = pack.header.stride
        self._pool = open_pool(self._place, shape.rows, stride)
        try:
            self._arena = open_arena(
                self._place, shape.rows + READERS, stride, kind="pinned", numa="gpu-local", on_limit="refuse"
            )
        except BaseException:
            self._pool.close()
            raise

    def _geometry(self) -> ServiceGeometry:
        shape = self.shape
        return ServiceGeometry(
            shape.layers,
            shape.experts,
            shape.top_k,
            shape.hidden,
            shape.intermediate,
            self.pack.header.layer_ids,
        )

    def kernels(self) -> LayerKernels:
        """The kernels that services run layers with."""
        kernels = open_kernels(self._place, self._geometry(), get_codec(self.pack.header.codec))
        assert kernels is not None
        return kernels

    @contextmanager
    def service(
        self, slots: int, mode: str, *, places: int | None = None, lookahead: int = 0
    ) -> Iterator[ExpertService]:
        """An open, cold service with that many slots. places: rows of its arena beside staging, None = all. lookahead:
        guesses of a token."""
        shape, header, place = self.shape, self.pack.header, self._place
        geometry = self._geometry()
        places = READERS + (shape.rows if places is None else places)
        codec = get_codec(header.codec)
        with tempfile.TemporaryDirectory(prefix="ziggurat-harness-") as name:
            tiers = Tiers(
                slots, places, self.device, self._max_tokens, {"mode": mode, "lookahead": lookahead}
            )
            service = ExpertService(
                tiers.config(Path(name), header.codec),
                geometry,
                codec,
                self.pack,
                _LentPool(self._pool, slots),
                _LentArena(self._arena, places),
                consensus=LocalConsensus(),
                metrics=TierMetrics(),
                kernels=open_kernels(place, geometry, codec),
                ring=open_ring(place, ring_of(auto_rows(header.stride, None), shape.experts), header.stride),
                max_tokens=self._max_tokens,
                mapped=map_arena(place, self._arena),
            )
            try:
                yield service
            finally:
                service.close()

    def all_rows(self) -> torch.Tensor:
        """uint8 [rows, stride], the pool itself with the row of key n in slot n, until the next service uses it."""
        self._pool.drain()
        pool = self._pool.tensor
        rows = self.pack.rows.to(self.device)
        for first in range(0, len(pool), len(rows)):
            part = pool[first : first + len(rows)]
            part.copy_(rows[: len(part)])
        return pool

    def close(self) -> None:
        self._arena.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
