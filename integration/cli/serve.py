"""`ziggurat serve`: packs if need be, then `vllm serve` with the tiers configured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.options import ConfigOption, read_inputs
from ziggurat.integration.cli.progress import RowProgress
from ziggurat.integration.packing import ensure_packs
from ziggurat.integration.preflight import preflight
from ziggurat.integration.vllm.compat import check_version
from ziggurat.integration.vllm.errors import SetupError
from ziggurat.integration.vllm.settings import KEY, LOAD_FORMAT, DebugOptions, to_additional_config
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.checkpoint import Checkpoint

_OURS = ("--load-format", "--model")


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(serve)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model folder; default: model.path of the configuration."),
    ] = None,
    config: ConfigOption = None,
    record_routing: Annotated[
        Path | None,
        typer.Option(
            "--record-routing",
            help="Folder that receives routing.npz, a trace of where tokens go, for `ziggurat simulate`.",
        ),
    ] = None,
    debug_json: Annotated[str | None, typer.Option("--debug-json", hidden=True)] = None,
) -> None:
    """Serve MODEL through tiers; arguments after `--` go to `vllm serve`."""
    extra = list(context.args)
    if model is not None and model.startswith("-"):
        # Without MODEL the first of vLLM's arguments stands in its place.
        extra.insert(0, model)
        model = None
    folder, tiers = read_inputs(None if model is None else Path(model), config)
    check_version()
    check_plugin_visible()
    debug = _parse_debug(debug_json)
    if record_routing is not None:
        debug["record_routing"] = str(record_routing.absolute())
    arguments = vllm_arguments(folder, tiers, extra, debug)
    tp = tensor_parallel_size(extra)
    preflight(folder, tiers, tp)
    with Checkpoint.open(folder) as checkpoint, RowProgress(f"packing {tiers.codecs.base}") as progress:
        ensure_packs(checkpoint, tiers, tp, progress)
    # Steps are taken over in vLLM's V1 model runner, which later releases no longer choose by themselves.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments])


def check_plugin_visible() -> None:
    """Refuse if vLLM would start without us: then our load format is unknown, but say it before it starts."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ziggurat" not in allowed.split(","):
        raise SetupError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin; add `ziggurat` to it or unset it"
        )


def tensor_parallel_size(arguments: list[str]) -> int:
    """The value of -tp / --tensor-parallel-size among vLLM's arguments; 1 if absent."""
    for index, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name.replace("_", "-") in ("--tensor-parallel-size", "-tp"):
            text = value if has_value else (arguments[index + 1] if index + 1 < len(arguments) else "")
            if not text.isdigit() or int(text) < 1:
                raise CliError(f"{name} needs a positive number, got {text!r}")
            return int(text)
    return 1


def _parse_debug(text: str | None) -> dict[str, Any]:
    """Switches of the determinism tests (``DebugOptions``), for our own demo and tests."""
    if text is None:
        return {}
    try:
        debug = json.loads(text)
    except ValueError as error:
        raise CliError(f"--debug-json is not JSON: {error}") from error
    if not isinstance(debug, dict):
        raise CliError("--debug-json must be a JSON object")
    DebugOptions.from_mapping(debug)
    return debug


def vllm_arguments(folder: Path, tiers: TiersConfig, extra: list[str], debug: dict[str, Any]) -> list[str]:
    """The arguments of `vllm serve`: ours first, the user's behind; CliError where they collide."""
    for argument in extra:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS:
            raise CliError(f"{name} is set by `ziggurat serve`; remove it")
    additional = to_additional_config(tiers, debug)
    extra, given = _take_additional_config(extra)
    if KEY in given:
        raise CliError(f"--additional-config already has a {KEY!r} key; the configuration comes from -c")
    payload = json.dumps({**given, **additional})
    return ["serve", str(folder), "--load-format", LOAD_FORMAT, "--additional-config", payload, *extra]


def _take_additional_config(arguments: list[str]) -> tuple[list[str], dict[str, object]]:
    rest: list[str] = []
    given: dict[str, object] = {}
    position = 0
    while position < len(arguments):
        name, has_value, value = arguments[position].partition("=")
        if name.replace("_", "-") != "--additional-config":
            rest.append(arguments[position])
            position += 1
            continue
        text = value if has_value else (arguments[position + 1] if position + 1 < len(arguments) else "")
        position += 1 if has_value else 2
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise CliError(f"--additional-config is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise CliError("--additional-config must be a JSON object")
        given.update(parsed)
    return rest, given
