"""Where the tests get Prometheus from: the PATH, the cache, or Debian's package, unpacked and not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lanes.prometheus import PROGRAMS, PrometheusError, prometheus_folder

VERSION = "2.42.0+ds-5"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but the shell and what a test puts there; the log of calls is in `calls` beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "mkdir", "touch", "echo"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $@" >> {folder.parent / "calls"}\n{script}\n', encoding="utf-8")
    path.chmod(0o755)


def calls(folder: Path) -> list[str]:
    path = folder.parent / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


UNPACK = 'mkdir -p "$3/usr/bin" && touch "$3/usr/bin/prometheus" "$3/usr/bin/promtool"'
DOWNLOAD = f"touch prometheus_{VERSION}_amd64.deb"
OWN_LISTS_ONLY = f"""
case "$*" in
    *lists=*update) exit 0 ;;
    *lists=*download*) {DOWNLOAD} ;;
    *) echo "E: no lists" >&2; exit 100 ;;
esac"""


def test_programs_on_the_path_are_taken(tools: Path, tmp_path: Path) -> None:
    for name in PROGRAMS:
        program(tools, name, "true")
    assert prometheus_folder(tmp_path / "cache") == tools
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("apt", [DOWNLOAD, OWN_LISTS_ONLY], ids=["lists of the system", "lists of our own"])
def test_the_package_is_fetched_once(tools: Path, tmp_path: Path, apt: str) -> None:
    program(tools, "apt-get", apt)
    program(tools, "dpkg-deb", UNPACK)
    cache = tmp_path / "cache"
    folder = prometheus_folder(cache)
    assert folder == cache / f"prometheus-{VERSION}" / "usr" / "bin"
    assert all((folder / name).is_file() for name in PROGRAMS)
    before = calls(tools)
    assert prometheus_folder(cache) == folder
    assert calls(tools) == before, "the second time nothing is fetched"
    assert [path.name for path in cache.iterdir()] == [f"prometheus-{VERSION}"]


def test_a_package_without_the_programs_is_refused(tools: Path, tmp_path: Path) -> None:
    program(tools, "apt-get", DOWNLOAD)
    program(tools, "dpkg-deb", 'mkdir -p "$3"')
    with pytest.raises(PrometheusError, match="does not hold prometheus and promtool"):
        prometheus_folder(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_apt_the_reason_is_told(tools: Path, tmp_path: Path) -> None:
    with pytest.raises(PrometheusError, match="there is no apt-get"):
        prometheus_folder(tmp_path / "cache")


def test_what_apt_says_is_told(tools: Path, tmp_path: Path) -> None:
    program(tools, "apt-get", 'echo "E: no network" >&2; exit 100')
    program(tools, "dpkg-deb", UNPACK)
    with pytest.raises(PrometheusError, match=r"cannot download .*no network.*; then .*no network"):
        prometheus_folder(tmp_path / "cache")
