"""The dependency rule: integration -> residency -> stores, allocators, kernels, and never the other way.

The contracts are in pyproject.toml and import-linter checks them. The tests here run it on the packages, and on a
small tree of bad imports to show that every contract can fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

grimp = pytest.importorskip("grimp", reason="import-linter's library is a tool of the CPU lane")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("allocators", "integration", "kernels", "residency", "stores")

LAYERS = "integration -> residency -> stores, allocators, kernels; the last three know nothing of each other"
ONLY_INTEGRATION = "only integration knows vLLM and the libraries that come with it"
NO_CHECKPOINTS = "residency knows packs and no checkpoints"
NOTHING_OUTSIDE = "no package imports the benchmarks or the tests"


class Bad(NamedTuple):
    package: str
    code: str
    target: str  # what import-linter says is imported
    contract: str


BAD_IMPORTS = (
    Bad("kernels", "import ziggurat.stores.good", "ziggurat.stores.good", LAYERS),
    Bad("kernels", "from ziggurat.residency import good", "ziggurat.residency.good", LAYERS),
    Bad("stores", "from ziggurat.allocators import good", "ziggurat.allocators.good", LAYERS),
    Bad("stores", "def f():\n    from ziggurat.kernels.good import x", "ziggurat.kernels.good", LAYERS),
    Bad("allocators", "from ziggurat.stores.good import *", "ziggurat.stores.good", LAYERS),
    Bad("residency", "from ziggurat.integration import good", "ziggurat.integration.good", LAYERS),
    Bad("residency", "def f():\n    import vllm.config", "vllm", ONLY_INTEGRATION),
    Bad("kernels", "from transformers import AutoConfig", "transformers", ONLY_INTEGRATION),
    Bad(
        "stores",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.config import VllmConfig",
        "vllm",
        ONLY_INTEGRATION,
    ),
    Bad(
        "residency", "from ziggurat.stores.checkpoint import C", "ziggurat.stores.checkpoint", NO_CHECKPOINTS
    ),
    Bad("residency", "from ziggurat.stores import builder", "ziggurat.stores.builder", NO_CHECKPOINTS),
    Bad("integration", "import bench.demo", "bench", NOTHING_OUTSIDE),
    Bad("allocators", "from support import weights", "support", NOTHING_OUTSIDE),
)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts on the `ziggurat` found in `folder`, or on the installed one if it has none."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-cache",
            "--no-logo",
            str(ROOT / "pyproject.toml"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def make_tree(folder: Path) -> None:
    """A `ziggurat` with an empty module in each package, and the modules that the contracts name."""
    for package in PACKAGES:
        (folder / "ziggurat" / package).mkdir(parents=True)
        for module in ("__init__", "good"):
            (folder / "ziggurat" / package / f"{module}.py").touch()
    for name in ("checkpoint", "builder"):
        (folder / "ziggurat" / "stores" / f"{name}.py").touch()


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Contract -> what import-linter says about it, for a tree with every bad import in a module of its own."""
    folder = tmp_path_factory.mktemp("bad")
    make_tree(folder)
    for number, bad in enumerate(BAD_IMPORTS):
        (folder / "ziggurat" / bad.package / f"bad_{number}.py").write_text(bad.code + "\n")
    done = lint_imports(folder)
    assert done.returncode == 1, done.stdout + done.stderr
    _, _, broken = done.stdout.partition("Broken contracts")
    starts = {broken.index(f"\n{bad.contract}\n"): bad.contract for bad in BAD_IMPORTS}
    ends = [*sorted(starts)[1:], len(broken)]
    return {starts[start]: broken[start:end] for start, end in zip(sorted(starts), ends, strict=True)}


def test_the_packages_keep_every_contract(tmp_path: Path) -> None:
    done = lint_imports(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 4 kept, 0 broken." in done.stdout


def test_the_checked_graph_holds_every_module_on_disk() -> None:
    """Contracts on an empty graph are all kept: import-linter must see what there is."""
    graph = grimp.build_graph(*(f"ziggurat.{package}" for package in PACKAGES), cache_dir=None)
    on_disk = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            on_disk.add(".".join(("ziggurat", *(part for part in parts if part != "__init__"))))
    assert graph.modules == on_disk


def test_a_tree_without_bad_imports_keeps_every_contract(tmp_path: Path) -> None:
    make_tree(tmp_path)
    done = lint_imports(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Analyzed 12 files" in done.stdout


@pytest.mark.parametrize("number", range(len(BAD_IMPORTS)))
def test_a_bad_import_breaks_its_contract(complaints: dict[str, str], number: int) -> None:
    bad = BAD_IMPORTS[number]
    importer = f"ziggurat.{bad.package}.bad_{number}"
    assert f"{importer} -> {bad.target} " in complaints[bad.contract]
    assert [name for name, text in complaints.items() if f"{importer} -> " in text] == [bad.contract]


def test_nothing_below_integration_loads_vllm() -> None:
    """The same rule at run time, which also covers imports by name that no static check sees."""
    graph = grimp.build_graph(*(f"ziggurat.{package}" for package in PACKAGES), cache_dir=None)
    modules = sorted(name for name in graph.modules if not name.startswith("ziggurat.integration"))
    program = "\n".join(
        [
            "import importlib, sys",
            "sys.modules['vllm'] = sys.modules['transformers'] = None",
            f"for name in {modules!r}:",
            "    importlib.import_module(name)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
