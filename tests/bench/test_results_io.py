"""Result files: whole or not at all, and nothing private in them."""

from __future__ import annotations

import getpass
import json
import math
import socket
import subprocess
from pathlib import Path

import pytest

from bench import results_io


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    content = {"loss": 1.373, "name": "±", "runs": [1, 2]}
    results_io.write_json(path, content)
    assert results_io.read_json(path) == content
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, object()])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "result.json"
    results_io.write_json(path, {"loss": 1})
    with pytest.raises((ValueError, TypeError)):
        results_io.write_json(path, {"loss": bad})
    assert results_io.read_json(path) == {"loss": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_absent_and_foreign_files(tmp_path: Path) -> None:
    assert results_io.read_json(tmp_path / "absent.json") == {}
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"list\.json"):
        results_io.read_json(tmp_path / "list.json")


def test_commands_carry_no_absolute_path() -> None:
    arguments = [
        "bench/heldout_loss.py",
        str(results_io.ROOT / "bench" / "models" / "demo-moe-fp8"),
        "/some/where/demo-moe",
        "--folder=/some/where/else",
        "--windows",
        "192",
    ]
    assert results_io.command_line(arguments) == (
        "python bench/heldout_loss.py bench/models/demo-moe-fp8 demo-moe --folder=else --windows 192"
    )


def test_provenance_names_no_host_user_or_path() -> None:
    found = results_io.provenance(["bench/x.py", str(Path.home())])
    assert set(found) == {"command", "commit", "date", "machine"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    text = json.dumps(found["machine"])
    assert "/home" not in text
    assert str(results_io.ROOT) not in text
    for private in (socket.gethostname(), getpass.getuser()):
        assert private not in json.loads(text).values()


def _git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_commit_says_when_files_differ_from_it(tmp_path: Path) -> None:
    assert results_io.commit(tmp_path) == "unknown"
    _git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "a.json").write_text("{}\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "first")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert results_io.commit(tmp_path) == head
    (tmp_path / "bench" / "results" / "a.json").write_text('{"new": 1}\n')
    assert results_io.commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2\n")
    assert results_io.commit(tmp_path) == f"{head}+changes"


def test_commands_leave_out_where_output_went() -> None:
    arguments = [
        "bench/x.py",
        "--results",
        "out",
        "--tokens",
        "1",
        "--commit=abc",
        "--logs",
        "--results",
        "--fast",
    ]
    found = results_io.provenance(arguments, at="abc")
    assert found["command"] == "python bench/x.py --tokens 1 --fast"
    assert found["commit"] == "abc"


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server-edition"),
    ],
)
def test_results_of_a_gpu_have_a_folder_of_its_name(gpu: str, folder: str) -> None:
    assert results_io.results_folder(gpu) == results_io.RESULTS / folder
    assert results_io.results_folder(None) == results_io.RESULTS
