"""`ziggurat replay`: the determinism test for users."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption, ModelArgument, read_inputs
from ziggurat.integration.cli.progress import RowProgress
from ziggurat.integration.cli.prompts import read_prompts
from ziggurat.integration.determinism.cases import Job, make_cases, make_workloads
from ziggurat.integration.determinism.environment import offline_environment
from ziggurat.integration.packing import ensure_packs
from ziggurat.integration.preflight import preflight
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.sizes import Size
from ziggurat.stores.checkpoint import Checkpoint

_MODES = ("inline", "replay")


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("replay")(replay)


def replay(
    model: ModelArgument = None,
    config: ConfigOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="UTF-8 file, one prompt a line; default: four built-in prompts."),
    ] = None,
    pools: Annotated[
        str,
        typer.Option("--pools", help="Pool sizes to compare with the all-resident run, separated by commas."),
    ] = "50%,25%,1 rows",
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=512, help="Tokens to generate per prompt.")
    ] = 16,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Also fail if a prompt's logits depend on its batch in the engine itself."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run prompts at several pool sizes, miss modes, slot orders and batches; status 1 if any logit bit differs."""
    folder, tiers = read_inputs(model, config)
    texts = read_prompts(prompts)
    sizes = [part.strip() for part in pools.split(",") if part.strip()]
    if not sizes:
        raise CliError("--pools names no size")
    for size in sizes:
        try:
            Size.parse(size)
        except ValueError as error:
            raise CliError(f"--pools: {error}") from error
    cases = make_cases(sizes, _MODES)
    for case in cases:
        preflight(folder, case.tiers(tiers), 1)
    with Checkpoint.open(folder) as checkpoint, RowProgress(f"packing {tiers.codecs.base}") as progress:
        ensure_packs(checkpoint, tiers, 1, progress)
    job = Job(str(folder), tiers.model_dump(mode="json"), cases, make_workloads(texts), tokens)
    results, status = _run(job)
    identical = status == 0 and not any(line["problems"] for line in results)
    moved = sorted({f"{line['workload']}: {one}" for line in results for one in line["neighbours"] or ()})
    if as_json:
        print(json.dumps({"identical": identical, "batch_invariant": not moved, "results": results}))
    else:
        _show(results, identical, moved)
    if not identical or (strict and moved):
        raise typer.Exit(1)


def _run(job: Job) -> tuple[list[dict[str, Any]], int]:
    """Run the job in a process of its own, whose environment vLLM reads at import."""
    console = Console(stderr=True)
    results: list[dict[str, Any]] = []
    log: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ziggurat-replay-") as folder:
        path = Path(folder) / "job.json"
        job.save(path)
        command = [sys.executable, "-m", "ziggurat.integration.determinism.worker", str(path)]
        process = subprocess.Popen(
            command, env=offline_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        with console.status("starting the engine") as shown:
            for line in process.stdout:
                marker, _, payload = line.partition("ziggurat-replay ")
                if payload and not marker:
                    results.append(json.loads(payload))
                    shown.update(f"{results[-1]['case']}: {results[-1]['workload']}")
                else:
                    log.append(line)
        status = process.wait()
    expected = len(job.cases) * len(job.workloads)
    if len(results) != expected:
        tail = "".join(log[-30:]).strip()
        raise ConfigError(
            f"the engine ended (status {status}) after {len(results)} of {expected} runs:\n{tail}"
        )
    return results, status


def _show(results: list[dict[str, Any]], identical: bool, moved: list[str]) -> None:
    out = Console()
    table = Table("case", "batches", "steps", "logits and tokens")
    by_case: dict[str, list[dict[str, Any]]] = {}
    for line in results:
        by_case.setdefault(line["case"], []).append(line)
    for case, lines in by_case.items():
        problems = [f"{line['workload']}: {problem}" for line in lines for problem in line["problems"]]
        steps = sum(line["steps"] for line in lines)
        table.add_row(case, str(len(lines)), str(steps), "\n".join(problems) if problems else "identical")
    out.print(table)
    out.print(f"all runs identical to the all-resident run of the same batch: {'yes' if identical else 'NO'}")
    if moved:
        out.print(f"logits independent of the batch: no ({'; '.join(moved)})", markup=False)
        out.print(
            "(the engine's own layers choose their arithmetic by the batch's shape; --strict makes it a failure)"
        )
    else:
        out.print("logits independent of the batch: yes")
