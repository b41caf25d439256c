"""How fast experts become packs, against a plain memory copy of the same source bytes in the same run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
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


def measure(layers: int, experts: int, repeats: int, folder: Path | None, tell: Callable[[str], None]) -> Any:
    """One record per source format and codec; MB are 10^6 source bytes, the fastest of ``repeats`` counts.

    encode: experts from the page cache into rows in memory. pack: the whole command, checksums, file and fsync too.
    copy: the same source bytes from the page cache's mapping into memory that is already there, by one thread.
    """
    runs = []
    for source in SOURCES:
        with tempfile.TemporaryDirectory(prefix="ziggurat-packing-", dir=folder) as work:
            model = Path(work) / "model"
            nbytes = write_experts(model, source, layers, experts)
            for codec in CODECS:
                runs.append(_measure(model, source, codec, nbytes, repeats, Path(work)))
                tell(_line(runs[-1]))
    return {
        "hidden": 2048,
        "intermediate": 768,
        "experts": layers * experts,
        "repeats": repeats,
        "runs": runs,
    }


def _measure(model: Path, source: str, codec: str, nbytes: int, repeats: int, work: Path) -> dict[str, Any]:
    with Checkpoint.open(model) as checkpoint:
        copy = _best(repeats, lambda: _copy(checkpoint))
        encode = _best(repeats, lambda: _encode(checkpoint, codec))
        pack = _best(repeats, lambda: _pack(checkpoint, codec, work))
    speeds = {
        name: nbytes / seconds / 1e6 for name, seconds in (("copy", copy), ("encode", encode), ("pack", pack))
    }
    return {
        "source": source,
        "codec": codec,
        "source_mb": round(nbytes / 1e6, 1),
        "mb_per_s": round(speeds["pack"], 1),
        "encode_mb_per_s": round(speeds["encode"], 1),
        "copy_mb_per_s": round(speeds["copy"], 1),
        "share_of_copy": round(speeds["pack"] / speeds["copy"], 3),
        "encode_share_of_copy": round(speeds["encode"] / speeds["copy"], 3),
    }


def _best(repeats: int, job: Callable[[], float]) -> float:
    return min(job() for _ in range(repeats))


def _weights(checkpoint: Checkpoint, layer: int, expert: int) -> list[StoredWeight]:
    stored = checkpoint.expert(layer, expert)
    return [stored.w1, stored.w3, stored.w2]


def _copy(checkpoint: Checkpoint) -> float:
    """Seconds to copy every expert's stored bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = [
            tensor
            for layer in range(len(checkpoint.layer_ids))
            for expert in range(checkpoint.experts)
            for weight in _weights(checkpoint, layer, expert)
            for tensor in (weight.data, weight.scale)
            if tensor is not None
        ]
        bytes_of = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        target = torch.zeros(max(part.numel() for part in bytes_of), dtype=torch.uint8)
        started = time.perf_counter()
        for part in bytes_of:
            target[: part.numel()].copy_(part)
        return time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)


def _encode(checkpoint: Checkpoint, codec: str) -> float:
    encoder = encoder_for(checkpoint, codec)
    row = torch.zeros(encoder.row_bytes(1), dtype=torch.uint8)
    started = time.perf_counter()
    for layer in range(len(checkpoint.layer_ids)):
        for expert in range(checkpoint.experts):
            encoder.encode(checkpoint.expert(layer, expert), 1, {0: row})
    return time.perf_counter() - started


def _pack(checkpoint: Checkpoint, codec: str, work: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="packs-", dir=work) as packs:
        tiers = TiersConfig.from_mapping({"tiers": {"disk": {"path": packs}}, "codecs": {"base": codec}})
        started = time.perf_counter()
        ensure_packs(checkpoint, tiers, 1)
        return time.perf_counter() - started


def _line(run: dict[str, Any]) -> str:
    return (
        f"packing {run['source']} to {run['codec']}: {run['mb_per_s']:.0f} MB/s to a file, "
        f"{run['encode_mb_per_s']:.0f} MB/s to memory; memory copy {run['copy_mb_per_s']:.0f} MB/s"
    )
