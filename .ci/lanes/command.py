"""The set-up command: check the machine, then build or reuse the environments of the lanes asked for."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from lanes.cuda_stubs import StubError, find_compiler
from lanes.environment import LANES, SetupError, cache_folder, ensure_environment, remove_unused
from lanes.overlay import ensure_overlay

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status. A failure is told in an `error:` line on stderr."""
    parser = argparse.ArgumentParser(
        prog="setup.py", description="Set up Ziggurat's environments in this clone."
    )
    parser.add_argument(
        "lanes", nargs="*", metavar="LANE", help=f"any of {', '.join(LANES)}, or all (default: 0.32)"
    )
    parser.add_argument(
        "--clean-cache",
        action="store_true",
        help="remove the cached environments that no lane of this clone uses, and stop",
    )
    options = parser.parse_args(arguments)
    names: list[str] = options.lanes or ["0.32"]
    if "all" in names:
        names = list(LANES)
    if unknown := [name for name in names if name not in LANES]:
        parser.error(f"unknown lane {unknown[0]!r}: choose from {', '.join(LANES)}")

    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.clean_cache:
            remove_unused(cache_folder())
            return 0
        compiler = _check_machine()
        for name in names:
            started = time.monotonic()
            lane = LANES[name]
            environment = ensure_environment(lane, cache_folder(), compiler)
            changed = ensure_overlay(lane, environment, ROOT)
            spent = time.monotonic() - started
            print(
                f"lane {name}: {lane.venv} {'ready' if changed else 'up to date'} ({spent:.1f} s)", flush=True
            )
    except (SetupError, StubError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _check_machine() -> list[str]:
    """Refuse a machine that lacks something that a set-up needs; returns the C compiler's command."""
    if sys.platform != "linux":
        raise SetupError(f"the lanes run on Linux only: vLLM for the CPU has no wheels for {sys.platform}")
    if sys.version_info >= (3, 14):
        raise SetupError(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} is too new for the pinned packages: "
            "use 3.11, 3.12 or 3.13 (make PYTHON=python3.12 ...)"
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise SetupError(
            f"{sys.executable} has no venv or ensurepip module: install it (Debian and Ubuntu: python3-venv)"
        )
    compiler = find_compiler()
    if compiler is None:
        raise SetupError(
            "no C compiler found: install gcc or clang (Debian and Ubuntu: build-essential), or set CC"
        )
    if shutil.which("make") is None:
        raise SetupError("make is not installed")
    return compiler


def _stop(signum: int, frame: object) -> NoReturn:
    """Turn SIGTERM into an exception, so that a half-built environment is removed on the way out."""
    raise KeyboardInterrupt
