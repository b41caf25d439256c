"""What a wheel holds, and that pyproject.toml names every package there is."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("allocators", "integration", "kernels", "residency", "stores")


def shipped_files() -> set[str]:
    """Every file of the five packages under the name it installs as."""
    return {
        f"ziggurat/{file.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy of the sources, as `pip wheel .` builds it."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    target = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


def test_pyproject_names_every_package_on_disk(project: dict[str, Any]) -> None:
    on_disk = {
        ".".join(("ziggurat", *file.parent.relative_to(ROOT).parts))
        for package in PACKAGES
        for file in (ROOT / package).rglob("__init__.py")
    }
    named = project["tool"]["setuptools"]["packages"]
    assert sorted(on_disk) == sorted(named)
    assert project["tool"]["setuptools"]["package-dir"] == {f"ziggurat.{name}": name for name in PACKAGES}


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_wheel_holds_every_file_of_every_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == shipped_files()
    assert {f"ziggurat/{name}/py.typed" for name in PACKAGES} <= held
    assert "ziggurat/__init__.py" not in held, "ziggurat is a namespace package"


def test_the_wheel_carries_license_and_entry_points(wheel: Path, project: dict[str, Any]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")
        points = archive.read(f"{info}/entry_points.txt").decode()
    for group, entries in project["project"]["entry-points"].items():
        assert f"[{group}]" in points
        for name, target in entries.items():
            assert f"{name} = {target}" in points


def test_a_plain_installation_imports(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "import ziggurat.kernels, ziggurat.residency; print(ziggurat.kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "ziggurat" / "kernels" / "__init__.py"


def test_the_plugins_are_found_through_package_metadata(project: dict[str, Any]) -> None:
    for group, entries in project["project"]["entry-points"].items():
        found = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
        assert entries.items() <= found.items()


@pytest.mark.vllm
def test_the_plugins_load(project: dict[str, Any]) -> None:
    for group, entries in project["project"]["entry-points"].items():
        found = {point.name: point for point in importlib.metadata.entry_points(group=group)}
        for name in entries:
            assert callable(found[name].load())
