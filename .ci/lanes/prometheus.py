"""Prometheus and promtool for the tests: those on the PATH, else Debian's package unpacked in the cache.

    python3 .ci/lanes/prometheus.py      # prints the folder they are in

Nothing is installed and nobody needs to be root: apt fetches the package into the cache, with lists of its own where
the system's are stale or absent, and dpkg-deb unpacks it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lanes.environment import cache_folder

PROGRAMS = ("prometheus", "promtool")
_SECONDS = 300.0


class PrometheusError(RuntimeError):
    """Prometheus cannot be had here; the message says what was tried."""


def prometheus_folder(cache: Path | None = None) -> Path:
    """The folder with both programs. PrometheusError if they are neither here nor to be had."""
    found = [shutil.which(name) for name in PROGRAMS]
    if found[0] is not None and found[1] is not None and Path(found[0]).parent == Path(found[1]).parent:
        return Path(found[0]).parent
    tools = cache or cache_folder().parent / "tools"
    unpacked = sorted(folder for folder in tools.glob("prometheus-*/usr/bin") if _complete(folder))
    return unpacked[-1] if unpacked else _fetch(tools)


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in PROGRAMS)


def _fetch(tools: Path) -> Path:
    """Download and unpack the package; the folder appears when it is whole."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise PrometheusError(
                f"prometheus is not on the PATH, and there is no {program} to fetch Debian's package"
            )
    tools.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prometheus-", dir=tools) as work:
        package = _download(Path(work))
        # prometheus_2.42.0+ds-5+deb12u1_amd64.deb
        version = package.name.split("_")[1]
        _run(["dpkg-deb", "-x", str(package), f"{work}/unpacked"], Path(work))
        if not _complete(Path(work) / "unpacked/usr/bin"):
            raise PrometheusError(f"{package.name} does not hold {' and '.join(PROGRAMS)}")
        target = tools / f"prometheus-{version}"
        try:
            (Path(work) / "unpacked").rename(target)
        except OSError:
            if not _complete(target / "usr/bin"):  # otherwise somebody else was faster
                raise
    return target / "usr/bin"


def _download(work: Path) -> Path:
    """With the system's package lists, and if that fails with lists of our own."""
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={work}", "-o", "Debug::NoLocking=1"]
    said = []
    for options in ([], own):
        try:
            if options:
                _run(["apt-get", *options, "update"], work)
            _run(["apt-get", *options, "download", "prometheus"], work)
            return next(iter(work.glob("prometheus_*.deb")))
        except (PrometheusError, StopIteration) as error:
            said.append(str(error))
    raise PrometheusError("apt-get cannot download the package prometheus: " + "; then ".join(said))


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrometheusError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise PrometheusError(f"{' '.join(command[:1] + command[-2:])}: {' '.join(last)}")


if __name__ == "__main__":
    try:
        print(prometheus_folder())
    except PrometheusError as problem:
        sys.exit(f"error: {problem}")
