"""The `ziggurat` command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from ziggurat.integration.cli import (
    arena,
    bench,
    doctor,
    packs,
    plan,
    portable,
    replay,
    report,
    serve,
    simulate,
    top,
    trace,
    verify,
)
from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.preflight import REFUSALS
from ziggurat.integration.vllm.errors import IntegrationError

app = typer.Typer(
    name="ziggurat",
    help="Tiered memory for the experts of Mixture-of-Experts models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for module in (
    plan,
    doctor,
    packs,
    portable,
    serve,
    arena,
    replay,
    simulate,
    trace,
    bench,
    top,
    report,
    verify,
):
    module.register(app)


_REFUSALS: tuple[type[Exception], ...] = (CliError, IntegrationError, *REFUSALS)


def main() -> None:
    """Run the command line; a refusal is one line on standard error and status 1."""
    try:
        app()
    except _REFUSALS as refusal:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"ziggurat: {refusal}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
