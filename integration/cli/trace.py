"""`ziggurat trace`: routing traces, looked at and recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption, ModelArgument, read_inputs
from ziggurat.integration.cli.progress import RowProgress
from ziggurat.integration.cli.prompts import read_prompts
from ziggurat.integration.determinism.environment import offline_environment
from ziggurat.integration.determinism.record import RecordJob
from ziggurat.integration.packing import ensure_packs
from ziggurat.integration.preflight import preflight
from ziggurat.residency.simulation.importers import import_trace
from ziggurat.residency.simulation.statistics import describe
from ziggurat.residency.simulation.trace import read_trace, write_trace
from ziggurat.stores.checkpoint import Checkpoint

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, .npz.")]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")]

app = typer.Typer(name="trace", help="Routing traces: info, import, record.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Mount the commands."""
    parent.add_typer(app)


@app.command("info")
def info(
    trace: TraceArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a trace holds, and how much of its routing repeats."""
    found = import_trace(trace)
    facts = describe(found)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for name, value in facts.items():
        if name != "by_layer":
            console.print(f"{name}: {_plain(value)}", markup=False)
    table = Table("layer", "experts used", "half of the pairs on", "again in the next step", "by chance")
    for line in facts["by_layer"]:
        table.add_row(
            str(line["layer"]),
            str(line["used"]),
            f"{line['half_on']} experts",
            f"{line['repeat']:.1%}",
            f"{line['chance']:.1%}",
        )
    console.print(table)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


@app.command("import")
def import_(trace: TraceArgument, output: OutputOption) -> None:
    """Write a trace of another shape in our own format."""
    write_trace(output, import_trace(trace))
    again = read_trace(output)
    typer.echo(f"{output}: {again.sequences} sequences, {again.tokens} tokens, {again.layers} layers")


@app.command("record")
def record(
    output: OutputOption,
    model: ModelArgument = None,
    config: ConfigOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="UTF-8 file, one prompt a line; default: four built-in prompts."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate per prompt.")] = 64,
) -> None:
    """Run MODEL through tiers and write where every token of every layer went.

    A server records in the same way while it serves: `ziggurat serve … --record-routing FOLDER`.
    """
    folder, tiers = read_inputs(model, config)
    texts = read_prompts(prompts)
    preflight(folder, tiers, 1)
    with Checkpoint.open(folder) as checkpoint, RowProgress(f"packing {tiers.codecs.base}") as progress:
        ensure_packs(checkpoint, tiers, 1, progress)
    with tempfile.TemporaryDirectory(prefix="ziggurat-record-") as scratch:
        job = RecordJob(str(folder), tiers.model_dump(mode="json"), texts, tokens, scratch)
        job.save(Path(scratch) / "job.json")
        command = [sys.executable, "-m", "ziggurat.integration.determinism.record", f"{scratch}/job.json"]
        done = subprocess.run(
            command, env=offline_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        recorded = Path(scratch) / "routing.npz"
        if done.returncode or not recorded.is_file():
            tail = "".join(done.stdout.splitlines(keepends=True)[-30:]).strip()
            raise CliError(f"the engine ended (status {done.returncode}) without a trace:\n{tail}")
        read_trace(recorded)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(recorded, output)
    found = read_trace(output)
    steps = 0 if found.batches is None else len(np.diff(found.batches))
    typer.echo(f"{output}: {found.tokens} tokens in {steps} steps, {found.layers} layers")
