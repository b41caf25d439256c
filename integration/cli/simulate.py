"""`ziggurat simulate`: what eviction policies and pool sizes would have done on a routing trace."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.plot import Line, Panel, draw_panels
from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.registry import HOST_POLICY
from ziggurat.residency.simulation.cost import StepCost
from ziggurat.residency.simulation.events import make_events
from ziggurat.residency.simulation.host import run_arena, simulated_host_names
from ziggurat.residency.simulation.importers import import_trace
from ziggurat.residency.simulation.requests import Requests
from ziggurat.residency.simulation.simulate import (
    BOUND,
    DEVICE,
    Result,
    Sharing,
    simulate,
    simulated_names,
)
from ziggurat.residency.simulation.trace import Trace
from ziggurat.residency.sizes import Size, format_bytes

_POOLS: dict[str, Sharing] = {"layer": "layer", "shared": "shared"}


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("simulate")(simulate_command)


def simulate_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, .npz; see `ziggurat trace info`.")],
    policy: Annotated[
        str, typer.Option("--policy", help=f"Separated by commas; all: {', '.join(simulated_names())}.")
    ] = "lru,lfu-decay,heat-weighted,next-use,belady",
    coverage: Annotated[
        str, typer.Option("--coverage", help="Slots in percent of the experts, separated by commas.")
    ] = "10,19,25,50",
    batch: Annotated[
        str, typer.Option("--batch", help="Sequences decoded side by side, separated by commas.")
    ] = "1",
    pool: Annotated[
        str,
        typer.Option(
            "--pool",
            help="layer: each layer has its share of the slots. shared: one pool for all layers, as in the service.",
        ),
    ] = "layer",
    prompt: Annotated[
        int | None,
        typer.Option(
            "--prompt", min=0, help="Take that many positions of each sequence as its prompt, a scan."
        ),
    ] = None,
    half_life: Annotated[
        float | None, typer.Option("--half-life", help="Steps; of policies that decay. Default: their own.")
    ] = None,
    rounds: Annotated[
        bool,
        typer.Option(
            "--rounds",
            help="Let a layer evict rows of its own step, as the host does, which computes in rounds.",
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Also simulate a host arena below the pool: places in percent of the experts, separated by commas.",
        ),
    ] = None,
    host_policy: Annotated[
        str,
        typer.Option(
            "--host-policy",
            help=f"Of the arena, separated by commas; all: {', '.join(simulated_host_names())}.",
        ),
    ] = f"lru,lfu-decay,{HOST_POLICY},{BOUND}",
    host_floor: Annotated[
        float | None,
        typer.Option(
            "--host-floor", min=0, max=100, help="Of each layer in the arena, in percent of an equal part."
        ),
    ] = None,
    row_size: Annotated[str, typer.Option("--row-size", help="Of one expert, such as 6.75MiB.")] = "6.75MiB",
    link: Annotated[float, typer.Option("--link", min=0.001, help="Host to device, GB/s.")] = 55.3,
    resident_ms: Annotated[
        float, typer.Option("--resident-ms", min=0.0, help="A step without misses, milliseconds.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw hit ratio over coverage into this PNG.")
    ] = None,
) -> None:
    """Simulate eviction policies on TRACE: hit ratio, missed rows, steps without a miss, bytes and predicted step time.

    A layer's routed set in a step is one event: none of it may be evicted during it. With --host, what each pool lacks
    is asked of arenas of several sizes under several policies, and what these lack is read from disk.
    """
    policies = _split(policy, "--policy")
    coverages = [_number(one, "--coverage") for one in _split(coverage, "--coverage")]
    batches = [_number(one, "--batch") for one in _split(batch, "--batch")]
    if pool not in _POOLS:
        raise CliError(f"--pool is layer or shared, not {pool!r}")
    if any(one != int(one) for one in batches):
        raise CliError(f"--batch: {batch} holds a fraction of a sequence")
    if half_life is not None and half_life <= 0:
        raise CliError(f"--half-life is {half_life}; it must be greater than 0")
    unknown = [name for name in policies if name not in simulated_names()]
    if unknown:
        raise CliError(f"--policy: there is no {unknown[0]!r}; there are {', '.join(simulated_names())}")
    arenas = _arenas(host, host_policy, host_floor)
    cost = StepCost(_row_bytes(row_size), link, resident_ms)
    found = _with_prompt(import_trace(trace), prompt)
    lines = []
    for size in batches:
        events = make_events(found, int(size))
        for name in policies:
            if name == DEVICE and pool == "layer":
                continue
            for percent in coverages:
                started = time.process_time()
                requests = Requests.of(events) if arenas.places else None
                result = simulate(
                    events,
                    name,
                    percent,
                    sharing=_POOLS[pool],
                    atomic=not rounds,
                    settings=PolicySettings(half_life=half_life),
                    requests=requests,
                )
                seconds = time.process_time() - started
                lines.append(_line(result, int(size), percent, cost, seconds))
                if requests is not None:
                    lines[-1]["host"] = arenas.run(requests)
    if not lines:
        raise CliError("the device's policy has one pool for all layers: add --pool shared")
    if DEVICE in policies and pool == "layer":
        typer.echo(f"{DEVICE} is left out: it has one pool for all layers, see --pool shared", err=True)
    if plot is not None:
        draw_panels(plot, f"{found.name}, {pool} pool", _panels(lines))
    if as_json:
        typer.echo(json.dumps(_document(found, pool, cost, lines), indent=2))
    else:
        _show(found, pool, cost, lines)


@dataclasses.dataclass(frozen=True, slots=True)
class _Arenas:
    """What to simulate below a pool. places: in percent of the experts. floor: of a layer, 0 to 1."""

    places: list[float]
    policies: list[str]
    floor: float | None

    def run(self, requests: Requests) -> list[dict[str, Any]]:
        """Every size under every policy."""
        return [
            {
                "size": percent,
                **run_arena(requests, name, requests.places_for(percent), floor=self.floor).to_json(),
            }
            for percent in self.places
            for name in self.policies
        ]


def _arenas(places: str | None, policies: str, floor: float | None) -> _Arenas:
    if places is None:
        return _Arenas([], [], None)
    sizes = [_number(one, "--host") for one in _split(places, "--host")]
    if any(one > 100 for one in sizes):
        raise CliError(f"--host: {places} is more than all experts")
    names = _split(policies, "--host-policy")
    unknown = [name for name in names if name not in simulated_host_names()]
    if unknown:
        raise CliError(
            f"--host-policy: there is no {unknown[0]!r} for an arena; there are {', '.join(simulated_host_names())}"
        )
    return _Arenas(sizes, names, None if floor is None else floor / 100)


def _line(result: Result, batch: int, coverage: float, cost: StepCost, seconds: float) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "batch": batch,
        "coverage": coverage,
        "slots": result.slots,
        "all": result.all.to_json(cost),
        "cold": result.cold_start.to_json(cost),
        "steady": result.steady.to_json(cost),
        "unserved": result.unserved,
        "step_ms": result.step_ms(cost),
        "pairs_per_second": round(result.all.pairs / max(seconds, 1e-9)),
    }


def _document(trace: Trace, pool: str, cost: StepCost, lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "sequences": trace.sequences,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "pool": pool,
        "cost": dataclasses.asdict(cost),
        "runs": lines,
    }


def _show(trace: Trace, pool: str, cost: StepCost, lines: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{trace.name}: {trace.sequences} sequences, {trace.tokens} tokens, {trace.layers} layers of {trace.experts} "
        f"experts, top-{trace.top_k}; {pool} pool; rows of {format_bytes(cost.row_bytes)}, {cost.link_gb_per_s:g} GB/s",
        markup=False,
    )
    for batch, coverage in dict.fromkeys((line["batch"], line["coverage"]) for line in lines):
        chosen = [line for line in lines if (line["batch"], line["coverage"]) == (batch, coverage)]
        table = Table(
            title=f"batch {batch}, {coverage:g} % = {chosen[0]['slots']} slots",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("policy", no_wrap=True)
        for heading in ("hits", "cold", "steady", "rows", "no miss", "MiB", "ms", "p99"):
            table.add_column(heading, justify="right", no_wrap=True)
        for line in chosen:
            steady = line["steady"] if line["steady"]["steps"] else line["all"]
            table.add_row(
                line["policy"],
                f"{line['all']['hit_ratio']:.2%}",
                f"{line['cold']['hit_ratio']:.1%}" if line["cold"]["steps"] else "-",
                f"{line['steady']['hit_ratio']:.2%}" if line["steady"]["steps"] else "-",
                f"{steady['rows_per_step']:.2f}",
                f"{steady['zero_miss_share']:.1%}",
                f"{steady['bytes_per_step'] / 2**20:.1f}",
                f"{line['step_ms']['mean']:.3f}",
                f"{line['step_ms']['p99']:.3f}",
            )
        console.print(table)
    for line in lines:
        _show_arenas(console, line)
    console.print("hits are of all pairs; rows, MiB and ms are a step's, once the pool is full", markup=False)
    if not cost.resident_ms:
        console.print(
            "step times are of the misses alone; --resident-ms adds what computing takes", markup=False
        )


def _show_arenas(console: Console, line: dict[str, Any]) -> None:
    """The arenas below one pool."""
    if not line.get("host"):
        return
    table = Table(
        title=f"below {line['policy']}, batch {line['batch']}, {line['coverage']:g} %",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("arena", no_wrap=True)
    for heading in ("places", "hits", "asked", "from disk", "no read"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in line["host"]:
        hits = "-" if one["hit_ratio"] is None else f"{one['hit_ratio']:.2%}"
        table.add_row(
            f"{one['size']:g} %, {one['policy']}",
            str(one["places"]),
            hits,
            f"{one['asked_per_step']:.2f}",
            f"{one['read_per_step']:.2f}",
            f"{one['no_read_share']:.1%}",
        )
    console.print(table)


def _panels(lines: list[dict[str, Any]]) -> list[Panel]:
    panels = []
    for batch in dict.fromkeys(line["batch"] for line in lines):
        here = [line for line in lines if line["batch"] == batch]
        curves = [
            Line(
                name,
                tuple(
                    sorted(
                        (line["coverage"], 100 * line["all"]["hit_ratio"])
                        for line in here
                        if line["policy"] == name
                    )
                ),
                dashed=name == BOUND,
            )
            for name in dict.fromkeys(line["policy"] for line in here)
        ]
        panels.append(Panel(f"batch {batch}", "coverage, % of the experts", "hit ratio, %", tuple(curves)))
    return panels


def _with_prompt(trace: Trace, prompt: int | None) -> Trace:
    if prompt is None:
        return trace
    if trace.batches is not None:
        raise CliError(f"{trace.name} recorded which tokens were prompts; --prompt does not apply")
    return dataclasses.replace(trace, prompts=np.minimum(trace.lengths, prompt))


def _split(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise CliError(f"{option} names nothing")
    return list(dict.fromkeys(parts))


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise CliError(f"{option}: {text!r} is no number") from None
    if not 0 < value < float("inf"):
        raise CliError(f"{option}: {text} is not greater than 0")
    return value


def _row_bytes(text: str) -> int:
    try:
        size = Size.parse(text)
    except ValueError as error:
        raise CliError(f"--row-size: {error}") from error
    if size.kind != "bytes":
        raise CliError(f"--row-size: {text!r} is no number of bytes")
    return max(1, int(size.amount))
