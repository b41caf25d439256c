"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ziggurat.integration.cli.failures import CliError
from ziggurat.residency.config import TiersConfig, find_config, load_config

ModelArgument = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="Model folder; default: model.path of the configuration."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="tiers.yaml; default: the file that ZIGGURAT_CONFIG names."),
]
TensorParallelOption = Annotated[int, typer.Option("--tp", min=1, max=64, help="Tensor-parallel size.")]


def read_inputs(model: Path | None, config: Path | None) -> tuple[Path, TiersConfig]:
    """The model folder and the configuration that a command works on. MODEL wins over ``model.path``."""
    tiers = load_config(find_config(config))
    folder = model or tiers.model.path
    if folder is None:
        raise CliError("no model: give MODEL or set model.path in the configuration")
    return folder, tiers
