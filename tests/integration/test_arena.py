"""`ziggurat arena`, and what plan and doctor say of it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from support.checkpoints import write_checkpoint
from support.keepers import attach, keeper, wait_for_keeper
from ziggurat.integration.cli import main as cli
from ziggurat.integration.cli.doctor import examine
from ziggurat.integration.machine import machine_limits
from ziggurat.integration.packing import wanted_headers
from ziggurat.residency.config import load_config
from ziggurat.residency.ledger import arena_key
from ziggurat.stores.checkpoint import Checkpoint

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: status, standard output, standard error."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ziggurat", *map(str, arguments)])
        status: object = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
        said = capsys.readouterr()
        assert isinstance(status, int)
        return status, said.out, said.err

    return command


def tiers_file(folder: Path, share: Path | None) -> Path:
    path = folder / "tiers.yaml"
    host = {"size": "50%", **({} if share is None else {"share": str(share)})}
    tiers = {
        "disk": {"path": str(folder), "readers": 2},
        "host": host,
        "device": {"size": "25%", "device": "cpu"},
    }
    path.write_text(yaml.safe_dump({"tiers": tiers, "codecs": {"base": "bf16"}}))
    return path


def test_the_command_becomes_a_small_process(tmp_path: Path) -> None:
    config = tiers_file(tmp_path, tmp_path / "socket")
    command = [sys.executable, "-m", "ziggurat.integration.cli.main", "arena", "-c", str(config)]
    with subprocess.Popen([*command, "--limit", "3MiB"], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_keeper(tmp_path / "socket", process)
            arena = attach(tmp_path / "socket")
            memory = psutil.Process(process.pid).memory_info().rss
            assert memory < 64 << 20
            assert memory < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2
            arena.close()
        finally:
            process.terminate()
    assert process.returncode == 0


def test_status(tmp_path: Path, run: Run) -> None:
    socket = tmp_path / "socket"
    with keeper(socket):
        arena = attach(socket)
        arena.share.publish(2, 5, 1)
        status, out, _ = run("arena", "--socket", socket, "--status", "--json")
        (held,) = json.loads(out)["arenas"]
        assert (status, held["published"], held["writer"]) == (0, 1, os.getpid())
        status, out, _ = run("arena", "--socket", socket, "--status")
        assert status == 0
        assert "40.00 KiB" in out
        arena.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["arena"], "no configuration"),
        (["arena", "--socket", "nobody", "--status"], "no arena process at"),
        (["arena", "--socket", "nobody", "--json"], "goes with --status"),
        (["arena", "--socket", "nobody", "--limit", "much"], "--limit"),
        (["arena", "--socket", "nobody", "--limit", "5 rows"], "bytes or a share"),
    ],
)
def test_refusals(
    arguments: list[str], match: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(*arguments)
    assert status == 1
    assert match in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_configuration_without_the_key_names_no_socket(tmp_path: Path, run: Run) -> None:
    status, _, err = run("arena", "-c", tiers_file(tmp_path, None))
    assert (status, "tiers.host.share" in err) == (1, True)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with keeper(tmp_path / "socket"):
        command = [sys.executable, "-m", "ziggurat.allocators.shared.process", str(tmp_path / "socket")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ziggurat arena: ")
    assert "another arena process" in done.stderr


# -- plan and doctor -----------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", kind="qwen3", layers=2, experts=4, hidden=64, intermediate=64)
    return tmp_path / "model"


def test_plan_names_the_process(model: Path, tmp_path: Path, run: Run) -> None:
    config = tiers_file(tmp_path, tmp_path / "socket")
    status, out, _ = run("plan", model, "-c", config, "--json")
    alone = json.loads(out)
    assert status == 0
    assert not alone["arena_shared"]
    assert any("no arena process" in note for note in alone["notes"])
    with keeper(tmp_path / "socket", limit=1 << 20):
        status, out, _ = run("plan", model, "-c", config, "--json")
        planned = json.loads(out)
        assert (status, planned["arena_shared"]) == (0, True)
        (check,) = [one for one in planned["checks"] if one["name"] == "arena process"]
        assert (check["needed"], check["have"]) == (planned["ranks"][0]["arena_bytes"], 1 << 20)
        _, out, _ = run("plan", model, "-c", config)
        assert "of the arena process" in " ".join(out.split())
    with keeper(tmp_path / "socket", limit=4096):
        status, _, err = run("plan", model, "-c", config)
        assert status == 1
        assert "arena process: needs" in err


def test_memory_that_the_process_has_given_already_is_no_obstacle(model: Path, tmp_path: Path) -> None:
    """A second start finds less memory free, since its arena is there: it counts as its own."""
    config = load_config(tiers_file(tmp_path, tmp_path / "socket"))
    with Checkpoint.open(model) as checkpoint:
        headers = wanted_headers(checkpoint, config, 1)
    have = 1 << 30
    with keeper(tmp_path / "socket", limit=90_000, allocatable=lambda: have) as segments:

        def room(*wanted: object) -> int | None:
            return machine_limits(config, [], headers=headers if wanted else []).arena_room

        assert room("mine") == 90_000
        mine = attach(tmp_path / "socket", key=arena_key(headers[0]))
        assert (room("mine"), room()) == (90_000, 90_000 - 40_960)
        other = attach(tmp_path / "socket")
        assert room("mine") == 90_000 - 40_960
        other.close()
        with segments._changed:
            assert segments._changed.wait_for(lambda: segments._segments["ab" * 32].idle, 10)
        assert room("mine") == 90_000, "nobody uses the other one"
        mine.close()


def test_doctor_looks_for_the_process(tmp_path: Path) -> None:
    config = tiers_file(tmp_path, tmp_path / "socket")
    (found,) = [one for one in examine(config) if one.name == "arena process"]
    assert (found.status, "ziggurat arena --socket" in found.advice) == ("note", True)
    with keeper(tmp_path / "socket"):
        attach(tmp_path / "socket").close()
        (found,) = [one for one in examine(config) if one.name == "arena process"]
        assert found.status == "ok"
        assert "1 arenas of 40.00 KiB" in found.value
    assert not [one for one in examine(tiers_file(tmp_path, None)) if one.name == "arena process"]
