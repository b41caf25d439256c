"""What the repository may hold: a fixed top level, files of readable size, and no words that belong elsewhere."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = {"residency", "allocators", "stores", "kernels", "integration", "bench", "tests", "docs", ".ci"}
FILES = {
    ".gitignore",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
}
MAX_LINES = 500
SOURCE_SUFFIXES = {
    ".c",
    ".cpp",
    ".cu",
    ".cuh",
    ".h",
    ".md",
    ".py",
    ".pyi",
    ".sh",
    ".toml",
    ".yaml",
    ".yml",
    ".txt",
}
# The model that the demo serves was trained on other people's source text, and is measured on some of it.
DATA_FOLDERS = (Path("bench/models"), Path("bench/results"))

# Each pattern is written so that it does not match itself.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.])/(wor[k]|roo[t]|hom[e])/|/tmp/(lane[s]|spe[c]|fres[h])|\.pyen[v]",
    "the address of a package registry": r"pypi\.or[g]|pythonhosted\.or[g]|npmjs\.(or[g]|co[m])|/op[t]/(wheels|pypi)",
    "how the work is organised": r"(?i)\b(colleagu[e]|sub-?agen[t]|my task promp[t]|this sessio[n]'s brief)",
    "unfinished work": r"\b(TOD[O]|FIXM[E]|XX[X])\b",
    "a type error silenced without its code": r"#\s*type:\s*ignor[e](?!\[)",
    "a lint silenced without its code": r"#\s*noq[a](?!:)",
}


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that are in the repository or about to be, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    names = (Path(name) for name in listed.stdout.split("\0") if name)
    return tuple(sorted(name for name in names if (ROOT / name).exists()))


def source_files() -> list[Path]:
    """Files that people read and write, relative to the root."""
    return [
        file
        for file in repository_files()
        if (file.suffix in SOURCE_SUFFIXES or not file.suffix)
        and (ROOT / file).is_file()
        and not any(folder in file.parents for folder in DATA_FOLDERS)
    ]


def test_the_top_level_is_fixed() -> None:
    top = {file.parts[0] for file in repository_files()}
    assert top <= FOLDERS | FILES, f"not part of the fixed top level: {sorted(top - FOLDERS - FILES)}"
    assert {folder for folder in FOLDERS if not (ROOT / folder).is_dir()} == set()
    assert {file for file in FILES if not (ROOT / file).is_file()} == set()


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(file): len((ROOT / file).read_text().splitlines()) for file in source_files()}
    assert len(lengths) > 50
    assert {file: n for file, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{file}:{number}: {line.strip()}"
        for file in source_files()
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of somebody's machine", "MODEL = '/wor" + "k/models/demo'"),
        ("a path of somebody's machine", "open('/roo" + "t/.cache')"),
        ("the address of a package registry", "pip install -i https://pypi.or" + "g/simple torch"),
        ("how the work is organised", "# a Colleagu" + "e wrote this"),
        ("unfinished work", "# TOD" + "O: later"),
        ("a type error silenced without its code", "x = 1  # type: ignor" + "e"),
        ("a lint silenced without its code", "x = 1  # noq" + "a"),
    ],
)
def test_the_patterns_match_what_they_are_for(what: str, line: str) -> None:
    assert re.search(FORBIDDEN[what], line)


def test_relative_links_in_documents_lead_somewhere() -> None:
    links = [
        (document, target)
        for document in (file for file in repository_files() if file.suffix == ".md")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / document).read_text())
        if "://" not in target
    ]
    assert links
    assert [link for link in links if not (ROOT / link[0].parent / link[1]).exists()] == []


def test_the_link_tree_names_the_five_packages() -> None:
    links = {link.name: link.resolve() for link in (ROOT / ".ci" / "src" / "ziggurat").iterdir()}
    assert links == {
        name: ROOT / name for name in ("allocators", "integration", "kernels", "residency", "stores")
    }
