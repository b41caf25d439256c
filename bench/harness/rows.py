"""A pack in host memory, made of random rows, so that real geometries need neither a checkpoint nor a disk."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from bench.random_rows import random_rows
from bench.shapes import MoeShape
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.stores.counts import PackCounts
from ziggurat.stores.pack import RowRequest, RowResult
from ziggurat.stores.packformat import PackHeader, stride_of

_THREADS = 8


class MemoryPack:
    """Fits residency's RowPack. `distinct` rows stand for all experts: the row of key n is row n % distinct.

    With at least as many distinct rows as a layer has experts no two experts of a layer are alike.
    """

    def __init__(self, shape: MoeShape, codec: str, distinct: int, seed: int = 0) -> None:
        geometry = ExpertGeometry(shape.hidden, shape.intermediate)
        coder = get_codec(codec)
        row_bytes = coder.row_bytes(geometry)
        self.header = PackHeader(
            codec=codec,
            codec_version=coder.version,
            layers=shape.layers,
            experts=shape.experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            row_bytes=row_bytes,
            stride=stride_of(row_bytes),
            tp_rank=0,
            tp_size=1,
            identity="synthetic",
            layer_ids=tuple(range(shape.layers)),
        )
        self.distinct = min(distinct, shape.rows)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="memory-pack")
        self._rows = random_rows(
            codec, geometry, self.distinct, self.header.stride, torch.device("cpu"), seed
        ).numpy()

    @property
    def rows(self) -> torch.Tensor:
        """uint8 [distinct, stride]."""
        return torch.from_numpy(self._rows)

    def row(self, key: int) -> torch.Tensor:
        """uint8 [stride] of the row of one key."""
        return torch.from_numpy(self._rows[key % self.distinct])

    def read_rows(self, wanted: Sequence[RowRequest]) -> Generator[RowResult, None, None]:
        """Copies the rows in a few threads; yields in the order of the requests."""
        jobs = [self._threads.submit(self._read, request) for request in wanted]
        try:
            for job in jobs:
                yield job.result()
        finally:
            wait(jobs)  # the buffers are somebody else's afterwards

    def _read(self, request: RowRequest) -> RowResult:
        started = time.perf_counter()
        layer, expert, buffer, _ = request
        source = self._rows[(layer * self.header.experts + expert) % self.distinct]
        np.copyto(np.frombuffer(buffer, dtype=np.uint8)[: source.size], source)
        return RowResult(layer, expert, source.size, time.perf_counter() - started, None)

    def counts(self) -> PackCounts:
        """Nothing is read from a file."""
        return PackCounts()

    def close(self) -> None:
        """Nothing is held open: the next service may use the same rows."""
