"""`ziggurat arena`: the process that keeps host arenas while engines come and go."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.shared.lease import ask_status
from ziggurat.allocators.shared.messages import ArenaStatus, Status
from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption
from ziggurat.residency.config import find_config, load_config
from ziggurat.residency.sizes import Size, format_bytes

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("arena")(arena)


def arena(
    config: ConfigOption = None,
    socket: Annotated[
        Path | None, typer.Option(help="Where engines ask; default: tiers.host.share of the configuration.")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            help="Memory of all arenas together, as 70GiB or 80%; default: what the machine can give."
        ),
    ] = None,
    huge_pages: Annotated[
        bool,
        typer.Option(
            "--huge-pages", help="Take reserved 2 MiB pages (vm.nr_hugepages), if there are enough."
        ),
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Say what the process that runs there keeps, and start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: as JSON.")] = False,
) -> None:
    """Keep host arenas for engines with tiers.host.share, so that a restarted one finds its rows in memory."""
    path = _socket(socket, config)
    if status:
        _show(ask_status(path), as_json)
        return
    if as_json:
        raise CliError("--json goes with --status")
    arguments = [str(path)]
    if limit is not None:
        arguments += ["--limit", str(_bytes(limit))]
    if huge_pages:
        arguments.append("--huge-pages")
    # A process of its own kind: this one has imported a hundred times what it needs to keep memory.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "ziggurat.allocators.shared.process", *arguments])


def _socket(given: Path | None, config: Path | None) -> Path:
    if given is not None:
        return given.absolute()
    share = load_config(find_config(config)).tiers.host.share
    if share is None:
        raise CliError("no socket: give --socket PATH or set tiers.host.share in the configuration")
    return share.absolute()


def _bytes(written: str) -> int:
    """A limit in bytes; a share is of the machine's memory."""
    try:
        size = Size.parse(int(written) if written.isdecimal() else written)
    except ValueError as error:
        raise CliError(f"--limit: {error}") from error
    if size.kind == "bytes":
        return int(size.amount)
    total = HostLimits.read().memory_total
    if size.kind != "percent" or total is None:
        raise CliError(f"--limit: expected bytes or a share of the memory, not {written!r}")
    return int(total * size.amount / 100)


def _show(found: Status, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    table = Table(
        title=f"arena process {found.pid}, at most {format_bytes(found.limit)}", title_justify="left"
    )
    for heading in ("rows of", "places", "bytes", "filled", "writer", "readers"):
        table.add_column(heading, justify="left" if heading == "rows of" else "right")
    for one in found.arenas:
        table.add_row(*_cells(one))
    Console(highlight=False).print(table)


def _cells(one: ArenaStatus) -> tuple[str, ...]:
    lost = f", {one.lost} lost" if one.lost else ""
    return (
        escape(one.label),
        str(one.places),
        format_bytes(one.bytes) + (" in huge pages" if one.huge else ""),
        f"{one.published}{lost}",
        "-" if one.writer is None else str(one.writer),
        ", ".join(map(str, one.readers)) or "-",
    )
