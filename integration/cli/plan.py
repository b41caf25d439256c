"""`ziggurat plan`: what every tier will take and whether this machine can give it, before anything is allocated."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ziggurat.integration.cli.bench import checkout
from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption, ModelArgument, TensorParallelOption, read_inputs
from ziggurat.integration.estimates import Given, estimate
from ziggurat.integration.packing import pack_paths, plan_packing
from ziggurat.integration.preflight import DEFAULT_MAX_TOKENS, chunk_advice, plan_for
from ziggurat.residency.budget_plan import Plan
from ziggurat.residency.sizes import format_bytes
from ziggurat.stores.checkpoint import Checkpoint

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("plan")(plan)


def plan(
    model: ModelArgument = None,
    config: ConfigOption = None,
    tp: TensorParallelOption = 1,
    graph_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens of the largest batch that a CUDA graph must serve without a miss: the pool holds every"
            " expert of a layer that it can route to.",
        ),
    ] = 0,
    max_tokens: Annotated[
        int,
        typer.Option(min=1, help="vLLM's --max-num-batched-tokens: GPU memory of the kernels depends on it."),
    ] = DEFAULT_MAX_TOKENS,
    link: Annotated[
        float | None,
        typer.Option(
            help="GB/s from locked host memory to the GPU (`ziggurat bench transfers` measures it): how long the rows"
            " of a decode step take; with --compute, how many tokens a chunk of a prompt should have."
        ),
    ] = None,
    compute: Annotated[
        float | None,
        typer.Option(
            help="TFLOP/s of the experts' kernels on large batches (`ziggurat bench kernels` measures it)."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded routing of this model, an .npz with topk_ids [sequences, positions, layers, top-k]: how many"
            " rows a decode step will miss. Without it the heat file is asked."
        ),
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a decode step with every expert on the GPU.")
    ] = None,
    decode_tokens: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, also if it is refused.")
    ] = False,
) -> None:
    """Show bytes per tier, coverage and floors of MODEL; status 1 and one line if it cannot work here."""
    _check_rates(link, compute, step_ms)
    given = Given(decode_tokens, link, step_ms, trace)
    folder, tiers = read_inputs(model, config)
    advice = None
    with Checkpoint.open(folder) as checkpoint:
        result = plan_for(checkpoint, tiers, tp, graph_tokens=graph_tokens, max_tokens=max_tokens)
        if link is not None and compute is not None:
            advice = chunk_advice(checkpoint, result, link=link * 1e9, compute=compute * 1e12)
        there = all(os.path.exists(path) for path in pack_paths(checkpoint, tiers, tp))
        packing = plan_packing(checkpoint, tiers, tp) if checkpoint.has_experts and not there else None
        decode = estimate(checkpoint, tiers, result, given, checkout() / "bench" / "results")
    if as_json:
        said = {
            "prompts": None if advice is None else asdict(advice),
            "decode": None if decode is None else decode.to_json(),
            "packing": None if packing is None else packing.to_json(),
        }
        typer.echo(json.dumps({**result.to_json(), **said}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(_tiers(result, str(tiers.tiers.disk.path)))
        console.print(_checks(result))
        for note in result.notes:
            console.print(f"note: {note}", markup=False)
        if packing is not None:
            console.print(packing.line(), markup=False, soft_wrap=True)
        if advice is not None:
            console.print(advice.line(), markup=False, soft_wrap=True)
        # Without an estimate only somebody who asked for one wants to know why.
        if decode is not None and (decode.step is not None or given.asks):
            for line in decode.lines():
                console.print(line, markup=False, soft_wrap=True)
    result.require()


def _check_rates(link: float | None, compute: float | None, step_ms: float | None) -> None:
    if compute is not None and link is None:
        raise CliError("--link is missing: advice on prompts needs --link and --compute")
    for name, rate in (("--link", link), ("--compute", compute), ("--step-ms", step_ms)):
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            what = "a time" if name == "--step-ms" else "a rate"
            raise CliError(f"{name}: {what} is a number greater than 0, not {rate}")


def _tiers(result: Plan, folder: str) -> Table:
    table = Table(
        title=f"{result.codec} rows of {format_bytes(result.row_bytes)} ({format_bytes(result.stride)} apart),"
        f" {result.rows} experts, tensor parallel {result.tp_size}",
        title_justify="left",
    )
    table.add_column("tier")
    for heading in ("rank", "rows", "bytes", "of the experts"):
        table.add_column(heading, justify="right")
    table.add_column("where")
    for rank in result.ranks:
        table.add_row("disk", str(rank.rank), *_amounts(result.rows, result), escape(folder))
    for rank in result.ranks:
        where = "no arena" if result.arena_kind == "none" else f"{result.arena_kind} host memory"
        if rank.pinned_bytes:
            node = "no NUMA node" if rank.numa_node is None else f"NUMA node {rank.numa_node}"
            where = f"pinned, {node}"
        if rank.arena_rows and result.arena_shared:
            where += ", of the arena process"
        if rank.staging_bytes:
            where += f", {format_bytes(rank.staging_bytes)} for reads in flight"
        table.add_row("host", str(rank.rank), *_amounts(rank.arena_rows, result), where)
        if rank.direct_rows:
            where = "of these, read in place"
            table.add_row("direct", str(rank.rank), *_amounts(rank.direct_rows, result), where)
    for rank in result.ranks:
        device = (
            f"cuda:{rank.rank}" if result.device.startswith("cuda:") and result.tp_size > 1 else result.device
        )
        table.add_row("device", str(rank.rank), *_amounts(rank.pool_rows, result), device)
        if rank.ring_parts:
            where = f"{device}, in {rank.ring_parts} parts"
            rows = rank.ring_parts * rank.ring_rows
            table.add_row("staging", str(rank.rank), *_amounts(rows, result), where)
        if rank.spare_bytes:
            rows = rank.spare_bytes // result.stride
            table.add_row("look-ahead", str(rank.rank), *_amounts(rows, result), device)
    return table


def _amounts(rows: int, result: Plan) -> tuple[str, str, str]:
    return str(rows), format_bytes(rows * result.stride), f"{rows / result.rows:.1%}"


def _checks(result: Plan) -> Table:
    table = Table()
    table.add_column("check")
    table.add_column("needs", justify="right")
    table.add_column("has", justify="right")
    table.add_column("")
    for check in result.checks:
        verdict = "[green]ok[/]" if check.ok else f"[bold red]short by {check.amount(check.short_by)}[/]"
        if check.unit == "support" and not check.ok:
            verdict = f"[bold red]{escape(check.detail)}[/]"
        table.add_row(check.name, check.amount(check.needed), check.amount(check.have), verdict)
    return table
