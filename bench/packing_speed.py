"""How fast experts become packs, against a plain memory copy of the same source bytes in the same run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.synthetic import write_experts
from ziggurat.integration.packing import encoder_for, ensure_packs
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.stored import StoredWeight

SOURCES = ("bf16", "fp8_block")
CODECS = ("bf16", "fp4", "w2")


def measure(
    layers: int, experts: int, repeats: int, folder: Path | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """One record per source format and codec; MB are 10^6 source bytes, the fastest of ``repeats`` counts.

    encode: experts from the page cache into rows in memory. pack: the whole job, checksums, file and fsync too.
    copy: the same source bytes from the page cache's mapping into memory that is already there. All use every core.
    Each repetition copies, encodes and packs in turn; the copy of a source counts for all codecs, since its bytes are
    the same. cpu_s: the fewest processor seconds, over all threads.
    """
    runs = []
    for source in SOURCES:
        with tempfile.TemporaryDirectory(prefix="ziggurat-packing-", dir=folder) as work:
            model = Path(work) / "model"
            mb = write_experts(model, source, layers, experts) / 1e6
            spent = {codec: _measure(model, codec, repeats, Path(work)) for codec in CODECS}
        copies = [copy for found in spent.values() for copy in found["copy"]]
        for codec, found in spent.items():
            runs.append(_record(source, codec, mb, {**found, "copy": copies}))
            tell(_line(runs[-1]))
    return {
        "hidden": 2048,
        "intermediate": 768,
        "experts": layers * experts,
        "repeats": repeats,
        "runs": runs,
    }


def _measure(model: Path, codec: str, repeats: int, work: Path) -> dict[str, list[Seconds]]:
    """What every repetition of each job took."""
    jobs: dict[str, Callable[[Checkpoint], Seconds]] = {
        "copy": _copy,
        "encode": lambda checkpoint: _encode(checkpoint, codec),
        "pack": lambda checkpoint: _pack(checkpoint, codec, work),
    }
    spent: dict[str, list[Seconds]] = {name: [] for name in jobs}
    with Checkpoint.open(model) as checkpoint:
        for _ in range(repeats):
            for name, job in jobs.items():
                spent[name].append(job(checkpoint))
    return spent


def _record(source: str, codec: str, mb: float, spent: dict[str, list[Seconds]]) -> dict[str, Any]:
    wall = {name: min(one.wall for one in found) for name, found in spent.items()}
    cpu = {name: min(one.cpu for one in found) for name, found in spent.items()}
    return {
        "source": source,
        "codec": codec,
        "source_mb": round(mb, 1),
        "mb_per_s": round(mb / wall["pack"], 1),
        "encode_mb_per_s": round(mb / wall["encode"], 1),
        "copy_mb_per_s": round(mb / wall["copy"], 1),
        "share_of_copy": round(wall["copy"] / wall["pack"], 3),
        "cpu_s": {name: round(seconds, 3) for name, seconds in cpu.items()},
    }


@dataclass(frozen=True, slots=True)
class Seconds:
    """wall: by the clock. cpu: of all threads of this process."""

    wall: float
    cpu: float


@contextmanager
def _timed() -> Iterator[Callable[[], Seconds]]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield lambda: Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def _weights(checkpoint: Checkpoint, layer: int, expert: int) -> list[StoredWeight]:
    stored = checkpoint.expert(layer, expert)
    return [stored.w1, stored.w3, stored.w2]


def _copy(checkpoint: Checkpoint) -> Seconds:
    """Copy every expert's stored bytes."""
    parts = [
        tensor.contiguous().view(-1).view(torch.uint8)
        for layer in range(len(checkpoint.layer_ids))
        for expert in range(checkpoint.experts)
        for weight in _weights(checkpoint, layer, expert)
        for tensor in (weight.data, weight.scale)
        if tensor is not None
    ]
    # As large as the source: a small target would stay in the cache, and memory would only be read.
    targets = [torch.ones_like(part) for part in parts]  # zeros would be given pages only when written to
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        with _timed() as spent:
            for part, target in zip(parts, targets, strict=True):
                target.copy_(part)
            return spent()
    finally:
        torch.set_num_threads(threads)


def _encode(checkpoint: Checkpoint, codec: str) -> Seconds:
    encoder = encoder_for(checkpoint, codec)
    row = torch.zeros(encoder.row_bytes(1), dtype=torch.uint8)
    with _timed() as spent:
        for layer in range(len(checkpoint.layer_ids)):
            for expert in range(checkpoint.experts):
                encoder.encode(checkpoint.expert(layer, expert), 1, {0: row})
        return spent()


def _pack(checkpoint: Checkpoint, codec: str, work: Path) -> Seconds:
    with tempfile.TemporaryDirectory(prefix="packs-", dir=work) as packs:
        tiers = TiersConfig.from_mapping({"tiers": {"disk": {"path": packs}}, "codecs": {"base": codec}})
        with _timed() as spent:
            ensure_packs(checkpoint, tiers, 1)
            return spent()


def _line(run: dict[str, Any]) -> str:
    return (
        f"packing {run['source']} to {run['codec']}: {run['mb_per_s']:.0f} MB/s to a file, "
        f"{run['encode_mb_per_s']:.0f} MB/s to memory; memory copy {run['copy_mb_per_s']:.0f} MB/s"
    )
