"""From a checkpoint to packs: the one place that joins stores (files) and kernels (codecs)."""

from __future__ import annotations

import glob
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ziggurat.kernels.codecs.encoder import RowEncoder
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.sizes import format_bytes
from ziggurat.stores.builder import build_pack, default_lanes, expected_header, peak_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackIncompleteError, PackLockedError, PackMissingError, StoreError
from ziggurat.stores.pack import BUILDING_SUFFIX, Pack, VerifyMode
from ziggurat.stores.packformat import PackHeader, pack_filename
from ziggurat.stores.progress import NoProgress, ProgressSink
from ziggurat.stores.readers.registry import open_reader
from ziggurat.stores.rebuild import CheckpointRows

#: What to do where packs are missing and there are no experts to make them from.
IMPORT_ADVICE = (
    "bring the pack with `ziggurat import FOLDER MODEL -c FILE` from what `ziggurat export` wrote, or run "
    "`ziggurat pack` where the whole checkpoint is"
)

_LOCK_POLL_SECONDS = 0.5
#: Source bytes from which on starting processes, two seconds or so, is soon made up for.
_WORTH_PROCESSES = 1 << 30
#: One chunk is read, one is on its way to the GPU or back, one is written, and one more evens that out.
_GPU_LANES = 4


class PackingDeviceError(StoreError):
    """The device that should quantize is unknown or not there."""


def encoder_for(checkpoint: Checkpoint, codec_name: str, device: str = "cpu") -> RowEncoder:
    """The encoder of a checkpoint's experts with a named codec, on a device as `packing_device` names them."""
    geometry = ExpertGeometry(checkpoint.hidden, checkpoint.intermediate)
    return RowEncoder(get_codec(codec_name), geometry, device)


def packing_device(wanted: str) -> str:
    """The device that quantizes: `wanted` is "cpu", "cuda:N", or "auto", which is a GPU where PyTorch sees one.

    Raises PackingDeviceError if it is none of these, or is not there.
    """
    if wanted == "cpu":
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        return f"cuda:{current}" if count else "cpu"
    number = re.fullmatch(r"cuda:(\d+)", wanted)
    if number is None:
        raise PackingDeviceError(f"device {wanted!r} is unknown; it can be auto, cpu or cuda:N")
    if int(number[1]) >= count:
        raise PackingDeviceError(f"there is no {wanted}: PyTorch sees {count} GPUs; use auto or cpu")
    return wanted


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How packs are built.

    encoder: on the device that was chosen. lanes: chunks under way. processes: whether there are several processes,
    which pays where Python quantizes and there is much to do. peak_bytes: bound of the host memory that takes.
    """

    encoder: RowEncoder
    lanes: int
    processes: bool
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "device": self.encoder.device,
            "lanes": self.lanes,
            "processes": self.processes,
            "peak_bytes": self.peak_bytes,
        }

    def line(self) -> str:
        """For people."""
        many = f"{self.lanes} lanes in {'processes' if self.processes else 'threads'}"
        return f"packing on {self.encoder.device}, {many}; host memory for it: at most {format_bytes(self.peak_bytes)}"


def plan_packing(
    checkpoint: Checkpoint, config: TiersConfig, tp_size: int, device: str = "auto"
) -> PackingPlan:
    """Raises PackingDeviceError, and CodecError for sizes that the codec cannot do."""
    encoder = encoder_for(checkpoint, config.codecs.base, packing_device(device))
    source = sum(checkpoint.layer_bytes(layer) for layer in range(len(checkpoint.layer_ids)))
    processes = encoder.device == "cpu" and source >= _WORTH_PROCESSES
    lanes = default_lanes(processes=processes) if encoder.device == "cpu" else _GPU_LANES
    peak = peak_bytes(checkpoint, encoder, tp_size, lanes=lanes, processes=processes)
    return PackingPlan(encoder, lanes, processes, peak)


def wanted_headers(checkpoint: Checkpoint, config: TiersConfig, tp_size: int) -> list[PackHeader]:
    """What the pack of each tensor-parallel rank must say about itself."""
    encoder = encoder_for(checkpoint, config.codecs.base)
    return [expected_header(checkpoint, encoder, rank, tp_size) for rank in range(tp_size)]


def pack_paths(checkpoint: Checkpoint, config: TiersConfig, tp_size: int) -> list[Path]:
    """Where the pack of each rank is or will be."""
    folder = config.tiers.disk.path
    return [folder / pack_filename(header) for header in wanted_headers(checkpoint, config, tp_size)]


def check_existing_packs(checkpoint: Checkpoint, config: TiersConfig, tp_size: int) -> list[Path]:
    """Open and close each pack that exists; PackError if one is damaged or another model's. Returns the missing."""
    missing = []
    for header in wanted_headers(checkpoint, config, tp_size):
        path = config.tiers.disk.path / pack_filename(header)
        if path.exists():
            Pack.open(path, expect=header).close()
        else:
            missing.append(path)
    return missing


def rows_from(folder: Path, header: PackHeader) -> CheckpointRows:
    """Makes rows of a pack with this header anew from the checkpoint in `folder`."""
    return CheckpointRows(folder, header, lambda opened: encoder_for(opened, header.codec))


def require_packs(checkpoint: Checkpoint, config: TiersConfig, tp_size: int) -> list[Path]:
    """`check_existing_packs`, but what is missing must be possible to build: a folder without experts cannot.

    Raises PackMissingError, or PackIncompleteError for an import that was not finished, besides.
    """
    missing = check_existing_packs(checkpoint, config, tp_size)
    if missing and not checkpoint.has_experts:
        first = missing[0]
        if first.with_name(first.name + BUILDING_SUFFIX).exists():
            raise PackIncompleteError(
                first, f"it is not complete, and {checkpoint.path} holds no expert tensors; {IMPORT_ADVICE}"
            )
        raise PackMissingError(
            first,
            f"there is no such pack, and {checkpoint.path} holds no expert tensors to make it from; {IMPORT_ADVICE}",
        )
    return missing


def complete_sizes(checkpoint: Checkpoint, config: TiersConfig) -> list[int]:
    """Tensor-parallel sizes for which the packs of all ranks are in the pack folder. Raises PackError for a bad one."""
    stem = pack_filename(wanted_headers(checkpoint, config, 1)[0]).removesuffix(".tp0of1.safetensors")
    sizes = {
        int(match[1])
        for path in config.tiers.disk.path.glob(glob.escape(stem) + ".tp0of*.safetensors")
        if (match := re.fullmatch(r".*\.tp0of([1-9][0-9]{0,3})\.safetensors", path.name))
    }
    return sorted(size for size in sizes if not check_existing_packs(checkpoint, config, size))


def open_pack(
    checkpoint: Checkpoint,
    config: TiersConfig,
    rank: int,
    tp_size: int,
    *,
    verify: VerifyMode | None = None,
) -> Pack:
    """Open one rank's pack with the reader that ``tiers.disk`` describes; damaged rows come from the checkpoint.

    verify: instead of ``tiers.disk.verify``.
    """
    header = wanted_headers(checkpoint, config, tp_size)[rank]
    disk = config.tiers.disk
    path = disk.path / pack_filename(header)
    # One rules file serves all ranks, or one each where the name says {rank}.
    faults = None if disk.faults is None else Path(str(disk.faults).replace("{rank}", str(rank)))
    reader = open_reader(
        disk.reader,
        path,
        threads=disk.readers,
        direct=disk.direct,
        timeout=disk.read_timeout,
        faults=faults,
    )
    rebuild = rows_from(checkpoint.path, header) if disk.rebuild else None
    return Pack.open(path, expect=header, reader=reader, verify=verify or disk.verify, rebuild=rebuild)


def ensure_packs(
    checkpoint: Checkpoint,
    config: TiersConfig,
    tp_size: int,
    progress: ProgressSink | None = None,
    *,
    wait: bool = True,
    device: str = "auto",
) -> list[Path]:
    """Build the packs of all ranks unless they are there, and return their paths in rank order.

    wait: if another process builds them now, wait for it (ranks of one engine start together); otherwise
    PackLockedError. A pack that exists but does not fit is an error and is left as it is; so is one that is missing
    where the checkpoint's folder holds no experts, see `require_packs`. device: see `packing_device`; the bytes are the
    same.
    """
    while True:
        if not require_packs(checkpoint, config, tp_size):
            return pack_paths(checkpoint, config, tp_size)
        how = plan_packing(checkpoint, config, tp_size, device)
        try:
            paths = build_pack(
                checkpoint,
                how.encoder,
                config.tiers.disk.path,
                tp_size,
                range(tp_size),
                progress or NoProgress(),
                lanes=how.lanes,
                processes=how.processes,
            )
            if how.encoder.device != "cpu":
                torch.cuda.empty_cache()  # what comes next wants the GPU's memory
            return paths
        except PackLockedError:
            if not wait:
                raise
            time.sleep(_LOCK_POLL_SECONDS)
