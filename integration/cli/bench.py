"""`ziggurat bench`: runs a benchmark of the checkout that this installation comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import ziggurat.integration
from ziggurat.integration.cli.failures import CliError

BENCHMARKS = {
    "codecs": ("bench/codecs.py", "packing speed in memory, by source format and codec"),
    "packing": ("bench/packing.py", "whole builds, beside reading, quantizing and writing alone"),
    "throughput": ("bench/throughput.py", "packing to a file, and decoding on the CPU"),
    "transfers": ("bench/transfers.py", "host rows to slots on a GPU, against the link"),
    "kernels": ("bench/kernels.py", "GPU kernels of a layer against their floor, beside vLLM's"),
    "harness": ("bench/harness/run.py", "decode steps of MoE layers through the tiers, without a model"),
    "inline": ("bench/harness/inline.py", "steps whose layers fetch their own misses, beside replay"),
    "inline-gather": ("bench/inline_gather.py", "the gather inside a graph against the link"),
    "admission": ("bench/admission_policy.py", "who chooses what leaves the pool, on recorded routing"),
    "lookahead": ("bench/lookahead.py", "guesses of the next layer's experts, and their worth"),
    "restart": ("bench/restart.py", "hit rate after a restart, and an arena that is found again"),
    "serve": ("bench/serve.py", "vllm serve on a GPU, beside stock vLLM"),
}
"""Name on the command line -> script in the checkout, and what it measures."""


def register(app: typer.Typer) -> None:
    """Mount the command."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("bench", context_settings=settings, help=_help())(bench)


def _help() -> str:
    listed = "\n\n".join(f"{name}: {what}" for name, (_, what) in BENCHMARKS.items())
    return f"Run a benchmark of this checkout; `ziggurat bench NAME --help` lists its options.\n\n{listed}"


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(BENCHMARKS))] = "",
) -> None:
    """Run a benchmark; what follows its name goes to it unchanged, and its status becomes ours."""
    if name in ("", "--help", "-h"):
        typer.echo(context.get_help())
        raise typer.Exit(0 if name else 2)
    if name not in BENCHMARKS:
        raise CliError(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    script = checkout() / BENCHMARKS[name][0]
    if not script.is_file():
        raise CliError(
            f"benchmarks are not installed with the package: {script.name} is not beside it. Install from a clone "
            "with `pip install -e .` and run this there"
        )
    sys.stdout.flush()
    raise typer.Exit(subprocess.call([sys.executable, str(script), *context.args]))


def checkout() -> Path:
    """The folder that holds `bench/` when this package was installed editable."""
    return Path(ziggurat.integration.__path__[0]).resolve().parent
