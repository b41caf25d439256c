"""`ziggurat verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.progress import RowProgress
from ziggurat.integration.packing import rows_from
from ziggurat.integration.portable import find_packs
from ziggurat.stores.errors import StoreError
from ziggurat.stores.exporting import changed_files
from ziggurat.stores.identity import checkpoint_identity
from ziggurat.stores.manifest import read_manifest
from ziggurat.stores.pack import Pack
from ziggurat.stores.rebuild import CheckpointRows
from ziggurat.stores.verify import VerifyReport, verify_pack


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("verify")(verify)


def verify(
    packs: Annotated[
        list[Path],
        typer.Argument(metavar="PACK...", help="Pack files, or folders that `ziggurat export` wrote."),
    ],
    rebuild: Annotated[
        Path | None,
        typer.Option(
            "--rebuild",
            metavar="MODEL",
            help="Make bad rows anew from this checkpoint, which the packs are of, and write them back.",
        ),
    ] = None,
) -> None:
    """Check every row of each PACK against its checksum; status 1 and the bad rows' names if one differs."""
    out = Console(highlight=False, soft_wrap=True)
    problems: dict[Path, str] = {}
    for one in packs:
        try:
            for file in _folder(one, out) if one.is_dir() else [one]:
                _rows(file, rebuild, out, problems)
        except StoreError as error:  # the other files are worth a look all the same
            problems[one] = str(error)
    if len(problems) > 1:
        for problem in problems.values():
            out.print(problem, markup=False)
    if problems:
        first, *others = problems.values()
        raise CliError(f"{first} ({len(others)} more packs are bad)" if others else first)


def _folder(folder: Path, out: Console) -> list[Path]:
    """The packs of an export, whose other files are as they were exported. CliError if they are not."""
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
    found = find_packs(folder)
    for path, header in found:
        if manifest is not None and header.identity != manifest.identity:
            raise CliError(
                f"{path}: packed from checkpoint {header.identity}, but this is an export of {manifest.identity}"
            )
    return [path for path, _ in found]


def _rows(file: Path, rebuild: Path | None, out: Console, problems: dict[Path, str]) -> None:
    """All rows of one pack; what is wrong with it goes to `problems`."""
    source = None if rebuild is None else _rows_for(file, rebuild)
    with RowProgress("verifying") as progress:
        report = verify_pack(file, progress, rebuild=source)
    for layer_id, expert in report.mended:
        out.print(f"mended row: layer {layer_id} expert {expert}", markup=False)
    for layer_id, expert, reason in report.bad:
        out.print(f"bad row: layer {layer_id} expert {expert}: {reason}", markup=False)
    if report.bad:
        problems[file] = _verdict(report, rebuild)
    else:
        out.print(f"{file}: all {report.rows} rows are good")


def _rows_for(file: Path, model: Path) -> CheckpointRows:
    """What makes the rows of one pack anew. CliError if the pack is not of that checkpoint."""
    opened = Pack.open(file, allow_absent=True)
    opened.close()
    header = opened.header
    identity = checkpoint_identity(model)
    if identity != header.identity:
        raise CliError(
            f"{file} is of another checkpoint than {model}: its identity is {header.identity[:20]}, the model's "
            f"{identity[:20]}; give --rebuild the folder that the pack was made from"
        )
    return rows_from(model, header)


def _verdict(report: VerifyReport, rebuild: Path | None) -> str:
    advice = "see above why they could not be mended"
    if rebuild is None:
        advice = (
            "`--rebuild MODEL` makes them anew, or delete it and run `ziggurat pack` again (`ziggurat import`, if that "
            "brought it)"
        )
    return f"{report.path}: {len(report.bad)} of {report.rows} rows are bad; {advice}"
