"""`ziggurat pack` and `dump`."""

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
from ziggurat.integration.preflight import plan_for
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.stores.builder import peak_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.pack import Pack


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command("pack")(pack)
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
