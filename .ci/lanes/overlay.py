"""The thin environment of one clone: this clone, editable, on top of a lane's shared environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path

from lanes.environment import Environment, Lane, locked
from lanes.installer import SetupError, install_editable, make_venv

# Counts up when this script lays the same thin environment out in another way.
LAYOUT_VERSION = 1
_STAMP = "ziggurat-lane.json"


def ensure_overlay(lane: Lane, environment: Environment, root: Path) -> bool:
    """Make `root/<lane.venv>` ready; returns False if it was already. Raises SetupError.

    Imports and package metadata (vLLM's entry points among them) reach the shared environment through a
    .pth file, so `pip install` in the clone's environment never writes into the shared one.
    """
    folder = root / lane.venv
    key = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    with locked(environment.folder.parent / f"clone-{key}.lock", str(folder)):
        wanted = _wanted(environment, root)
        stamp = folder / _STAMP
        if stamp.is_file():
            if stamp.read_text() == wanted and (folder / "bin" / "python").exists():
                return False
        elif folder.is_symlink() or folder.exists():
            raise SetupError(f"{folder} is there and not made by this script: move it away first")
        _lay_out(folder, environment, root, wanted)
    return True


def _wanted(environment: Environment, root: Path) -> str:
    """What the stamp of an up-to-date thin environment says."""
    facts = {
        "layout": LAYOUT_VERSION,
        "environment": str(environment.folder),
        "python": platform.python_version(),
        "base": sys.base_prefix,
        "root": str(root),
        "pyproject": hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest(),
    }
    return json.dumps(facts, indent=1) + "\n"


def _lay_out(folder: Path, environment: Environment, root: Path, wanted: str) -> None:
    old = folder.with_name(f"{folder.name}.removing")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
        shutil.rmtree(old)
    # A stamp that matches nothing marks the folder as ours from the start until it is complete.
    stamp = folder / _STAMP
    folder.mkdir()
    stamp.write_text("incomplete\n")
    make_venv(folder, "--without-pip")
    (Environment(folder).site_packages / "ziggurat-lane.pth").write_text(f"{environment.site_packages}\n")
    _add_commands(folder / "bin", environment)
    install_editable(folder / "bin" / "python", root)
    stamp.write_text(wanted)


def _add_commands(bin_folder: Path, environment: Environment) -> None:
    """Offer the shared environment's commands (pytest, ruff, vllm, …) under the clone's own Python."""
    for distribution in importlib.metadata.distributions(path=[str(environment.site_packages)]):
        for entry in distribution.entry_points.select(group="console_scripts"):
            script = bin_folder / entry.name
            script.write_text(_console_script(bin_folder / "python", entry.module, entry.attr))
            script.chmod(0o755)
    for program in environment.python.parent.iterdir():
        if program.is_file() and not program.is_symlink() and program.read_bytes()[:4] == b"\x7fELF":
            (bin_folder / program.name).symlink_to(program)


def _console_script(python: Path, module: str, attribute: str) -> str:
    """The text of a command that calls `module.attribute` under `python`."""
    interpreter = f"#!{python}\n"
    if len(interpreter) > 127 or " " in interpreter:
        # The kernel takes neither. The shell runs the second line; Python sees a string in it.
        interpreter = f"""#!/bin/sh\n'''exec' "{python}" "$0" "$@"\n' '''\n"""
    first = attribute.split(".")[0]
    return f"{interpreter}import sys\n\nfrom {module} import {first}\n\nsys.exit({attribute}())\n"
