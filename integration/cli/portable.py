"""`ziggurat export` and `import`: packs, and models without experts, that move between machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption, ModelArgument, TensorParallelOption, read_inputs
from ziggurat.integration.cli.progress import RowProgress
from ziggurat.integration.portable import CONFIG_NAME, bring, choose, export, find_packs
from ziggurat.residency.config import find_config, load_config
from ziggurat.residency.sizes import format_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.exporting import Exported
from ziggurat.stores.manifest import MANIFEST_FILE


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command("export")(export_)
    app.command("import")(import_)


def export_(
    to: Annotated[Path, typer.Option("--to", help="Folder to write; made if it is not there.")],
    model: ModelArgument = None,
    config: ConfigOption = None,
    tp: TensorParallelOption = 1,
    packs_only: Annotated[
        bool, typer.Option("--packs-only", help="Write the packs alone, straight into the folder.")
    ] = False,
) -> None:
    """Write MODEL without its experts, and their packs, into a folder that another machine can serve from.

    Packs that are missing are built first. Every row is checked on the way; a run that was stopped is continued.
    """
    out = Console(highlight=False, soft_wrap=True)
    folder, tiers = read_inputs(model, config)
    with (
        Checkpoint.open(folder) as checkpoint,
        RowProgress(f"packing {tiers.codecs.base}") as packing,
        RowProgress("copying packs") as copying,
        RowProgress("copying the rest", unit="tensors") as rest,
    ):
        done = export(
            checkpoint, tiers, tp, to, packs_only=packs_only, packing=packing, copying=copying, rest=rest
        )
    packs = done.packs if isinstance(done, Exported) else done
    for path in packs:
        out.print(f"{path} ({format_bytes(path.stat().st_size)})", markup=False)
    if not isinstance(done, Exported):
        return
    out.print(f"{to}: the model without its experts ({format_bytes(done.nbytes)})", markup=False)
    if done.left_out:
        out.print(f"not taken along: {', '.join(done.left_out)}", markup=False)
    more = f" -- -tp {tp}" if tp > 1 else ""
    out.print(f"serve it with `ziggurat serve -c {to / CONFIG_NAME}{more}`", markup=False)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="What `ziggurat export` wrote, a folder of packs, or one pack."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, with experts or without; default: model.path of the configuration, or FOLDER.",
        ),
    ] = None,
    config: ConfigOption = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", min=1, max=64, help="Tensor-parallel size; default: every size that is there."),
    ] = None,
) -> None:
    """Bring packs of MODEL from FOLDER to tiers.disk.path, once every row and the checkpoint's identity are right."""
    out = Console(highlight=False, soft_wrap=True)
    tiers = load_config(find_config(config))
    folder = model or tiers.model.path
    if folder is None and (source / MANIFEST_FILE).is_file():
        folder = source
    if folder is None:
        raise CliError("no model: give MODEL or set model.path in the configuration")
    with Checkpoint.open(folder) as checkpoint, RowProgress("importing") as progress:
        choice = choose(find_packs(source), checkpoint, tiers, tp)
        for path, header in choice.foreign:
            out.print(f"left alone: {path}, packed from checkpoint {header.identity}", markup=False)
        brought = bring(choice, tiers.tiers.disk.path, progress)
    for path, copied in brought:
        what = "every row is good" if copied else "was there already, every row is good"
        out.print(f"{path} ({format_bytes(path.stat().st_size)}): {what}", markup=False)
