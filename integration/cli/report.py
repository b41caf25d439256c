"""`ziggurat report`: one HTML page about a routing trace or a recording of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.observability.page import PageError
from ziggurat.integration.observability.recording import is_recording, read_recording
from ziggurat.integration.observability.report.from_recording import recording_report
from ziggurat.integration.observability.report.from_trace import Machine, TraceError, load_trace, trace_report
from ziggurat.residency.sizes import Size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("report")(report)


def report(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A routing trace (.npz), or what `ziggurat top --record` wrote."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
    row_size: Annotated[
        str, typer.Option("--row-size", help="Of one expert, for predictions from a trace.")
    ] = "6.75MiB",
    link: Annotated[
        float, typer.Option("--link", min=0.001, help="Host to device, GB/s, for predictions.")
    ] = 55.3,
    resident_ms: Annotated[
        float, typer.Option("--resident-ms", min=0.0, help="A step without misses, for predictions.")
    ] = 10.0,
) -> None:
    """Write a self-contained page: coverage, misses by layer, time of a step, heat map."""
    try:
        if is_recording(source):
            page = recording_report(read_recording(source))
        else:
            machine = Machine(_row_bytes(row_size), link * 1e9, resident_ms / 1e3)
            page = trace_report(load_trace(source), machine)
    except (PageError, TraceError) as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"cannot read {source}: {error.strerror or error}") from error
    try:
        output.write_text(page.html(), encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}") from error
    typer.echo(f"{output}: {page.title}, {output.stat().st_size / 1024:.0f} KiB")


def _row_bytes(text: str) -> int:
    try:
        size = Size.parse(text)
    except ValueError as error:
        raise CliError(f"--row-size: {error}") from error
    if size.kind != "bytes" or size.amount < 1:
        raise CliError(f"--row-size: {text} is no number of bytes; say for example 6.75MiB")
    return int(size.amount)
