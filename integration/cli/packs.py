"""`ziggurat pack`, `verify` and `dump`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption, ModelArgument, TensorParallelOption, read_inputs
from ziggurat.integration.cli.progress import RowProgress
from ziggurat.integration.packing import encoder_for, ensure_packs, require_packs
from ziggurat.integration.portable import find_packs
from ziggurat.integration.preflight import plan_for
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.stores.builder import peak_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.exporting import changed_files
from ziggurat.stores.manifest import read_manifest
from ziggurat.stores.pack import Pack
from ziggurat.stores.verify import verify_pack


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command("pack")(pack)
    app.command("verify")(verify)
    app.command("dump")(dump)


def pack(model: ModelArgument = None, config: ConfigOption = None, tp: TensorParallelOption = 1) -> None:
    """Build the pack files of MODEL's experts; continues where a killed build stopped."""
    out = Console(highlight=False, soft_wrap=True)
    folder, tiers = read_inputs(model, config)
    with Checkpoint.open(folder) as checkpoint:
        if not checkpoint.has_experts:
            require_packs(checkpoint, tiers, tp)
        short = [check for check in plan_for(checkpoint, tiers, tp).short if check.key == "tiers.disk.path"]
        if short:
            raise CliError(short[0].line())
        if checkpoint.has_experts:
            bound = peak_bytes(checkpoint, encoder_for(checkpoint, tiers.codecs.base), tp)
            out.print(f"host memory for packing: at most {bound / 2**20:.0f} MiB")
        with RowProgress(f"packing {tiers.codecs.base}") as progress:
            paths = ensure_packs(checkpoint, tiers, tp, progress, wait=False)
    for path in paths:
        out.print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")


def verify(
    pack_file: Annotated[
        Path, typer.Argument(metavar="PACK", help="A pack file, or a folder that `ziggurat export` wrote.")
    ],
) -> None:
    """Check every row of PACK against its checksum; status 1 and the bad rows' names if one differs."""
    out = Console(highlight=False, soft_wrap=True)
    if pack_file.is_dir():
        _verify_folder(pack_file, out)
    else:
        _verify_rows(pack_file, out)


def _verify_folder(folder: Path, out: Console) -> None:
    """An export: its other files first, then its packs."""
    manifest = read_manifest(folder)
    if manifest is not None:
        with Console(stderr=True).status(f"reading {len(manifest.files)} files"):
            changed = changed_files(folder, manifest)
        for name in changed:
            out.print(f"changed since it was exported: {name}", markup=False)
        if changed:
            raise CliError(
                f"{folder}: {len(changed)} of {len(manifest.files)} files are not what was exported"
            )
        out.print(f"{folder}: all {len(manifest.files)} files are as they were exported")
    for path, header in find_packs(folder):
        if manifest is not None and header.identity != manifest.identity:
            raise CliError(
                f"{path}: packed from checkpoint {header.identity}, but this is an export of {manifest.identity}"
            )
        _verify_rows(path, out)


def _verify_rows(path: Path, out: Console) -> None:
    with RowProgress("verifying") as progress:
        report = verify_pack(path, progress)
    for layer_id, expert, reason in report.bad:
        out.print(f"bad row: layer {layer_id} expert {expert}: {reason}", markup=False)
    if report.bad:
        raise CliError(
            f"{path}: {len(report.bad)} of {report.rows} rows are bad; delete it and run `ziggurat pack` again"
            " (`ziggurat import`, if that brought it)"
        )
    out.print(f"{path}: all {report.rows} rows are good")


def dump(
    pack_file: Annotated[Path, typer.Argument(metavar="PACK", help="A pack file.")],
    layer: Annotated[int, typer.Option("--layer", help="The model's own layer number.")],
    expert: Annotated[int, typer.Option("--expert", help="Expert of that layer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.")],
) -> None:
    """Write one expert dequantized: float32 `w1` and `w3` [I, H], `w2` [H, I]; of this rank's share under TP."""
    opened = Pack.open(pack_file, verify="always")
    try:
        header = opened.header
        if layer not in header.layer_ids:
            raise CliError(f"{pack_file} has no layer {layer}; its MoE layers are {list(header.layer_ids)}")
        if not 0 <= expert < header.experts:
            raise CliError(f"{pack_file} has no expert {expert}; experts are 0 to {header.experts - 1}")
        row = opened.read_row(header.layer_ids.index(layer), expert)
    finally:
        opened.close()
    geometry = ExpertGeometry(header.hidden, header.intermediate).shard(header.tp_size)
    decoded = get_codec(header.codec).decode(row, geometry)
    share = geometry.intermediate
    partial = output.with_name(output.name + ".part")
    try:
        with partial.open("wb") as file:
            np.savez(
                file,
                w1=decoded.w13[:share].numpy(),
                w3=decoded.w13[share:].numpy(),
                w2=decoded.w2.numpy(),
            )
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CliError(f"cannot write {output}: {error.strerror}") from error
