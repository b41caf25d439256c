"""Builds in several processes: the same bytes, errors with their names, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from support.building import snapshot
from support.checkpoints import SizeArgs, write_checkpoint
from support.progress import Recorder
from support.verbatim import VerbatimEncoder
from ziggurat.stores import workers
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.chunks import Chunk
from ziggurat.stores.stored import StoredExpert
from ziggurat.stores.workers import WorkerError

TESTS = Path(__file__).parents[1]


class Failing(VerbatimEncoder):
    """Fails at one expert."""

    def encode(self, expert: StoredExpert, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        if expert.w1.name == "model.layers.1.mlp.experts.2.gate_proj.weight":
            raise ValueError(f"{expert.w1.name} cannot be encoded")
        super().encode(expert, tp_size, outs)


class Dying(VerbatimEncoder):
    """Kills the process that encodes, unless that is the builder's own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.builder = os.getpid()

    def encode(self, expert: StoredExpert, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        if os.getpid() != self.builder:
            os.kill(os.getpid(), signal.SIGKILL)
        super().encode(expert, tp_size, outs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many layers that processes get something to do before one thread has done it all."""
    folder = tmp_path_factory.mktemp("workers") / "model"
    sizes: SizeArgs = {
        "layers": 40,
        "experts": 24,
        "top_k": 2,
        "hidden": 256,
        "intermediate": 160,
        "vocab": 64,
    }
    write_checkpoint(folder, **sizes)
    return folder


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_same_bytes_as_in_threads(small: Checkpoint, tmp_path: Path, tp_size: int) -> None:
    encoder = VerbatimEncoder(small)
    sink = Recorder()
    build_pack(small, encoder, tmp_path / "processes", tp_size, progress=sink, lanes=3, processes=True)
    build_pack(small, encoder, tmp_path / "threads", tp_size, lanes=2)
    assert snapshot(tmp_path / "processes") == snapshot(tmp_path / "threads")
    assert sink.advanced[0] == 6 * tp_size
    assert children() == []


def test_an_encoders_error_keeps_its_kind_and_leaves_nothing_behind(
    small: Checkpoint, tmp_path: Path
) -> None:
    for lanes in (1, 3):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.2.* cannot be encoded"):
            build_pack(small, Failing(small), tmp_path, lanes=lanes, processes=True)
        assert snapshot(tmp_path) == {}
        assert children() == []


def test_a_process_that_dies_is_an_error(model: Path, tmp_path: Path) -> None:
    with (
        Checkpoint.open(model) as checkpoint,
        pytest.raises(WorkerError, match="ended unexpectedly"),
    ):
        build_pack(checkpoint, Dying(checkpoint), tmp_path, lanes=3, processes=True)
    assert snapshot(tmp_path) == {}
    assert children() == []


def test_a_checkpoint_that_changed_since_is_an_error(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "_states", lambda checkpoint: [(0, 0, 0, 0) for _ in checkpoint.shards])
    with workers.WorkerProcesses(1, small, VerbatimEncoder(small), []) as others:
        (build,) = others.builders
        with pytest.raises(WorkerError, match="ended unexpectedly"):
            build(Chunk(0, (0,), ()))
    assert "the checkpoint changed while it was being packed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("lanes", "own", "processes"), [(2, 1, 1), (3, 2, 1), (6, 3, 1), (7, 3, 2), (12, 3, 3)]
)
def test_where_lanes_are(lanes: int, own: int, processes: int) -> None:
    assert workers.own_lanes(lanes) == own
    assert workers.workers_of(lanes) == processes


BUILD = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import psutil
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint

class Told:
    rows = 0
    def start(self, total_rows, total_bytes): pass
    def advance(self, rows, nbytes):
        self.rows += rows
        others = [p.pid for p in psutil.Process().children(recursive=True)]
        print(json.dumps([self.rows, others]), flush=True)
        sys.stdin.readline()
    def finish(self): pass

with Checkpoint.open(Path(sys.argv[2])) as checkpoint:
    build_pack(checkpoint, VerbatimEncoder(checkpoint), Path(sys.argv[3]), progress=Told(), lanes=4, processes=True)
"""


def test_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    """SIGKILL of the builder ends its processes too; a later build continues and gives the same bytes."""
    command = [sys.executable, "-c", BUILD, str(TESTS), str(model), str(tmp_path / "cut")]
    for stop_at in (3, 20):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        others: list[psutil.Process] = []
        for _ in range(stop_at):
            _, pids = json.loads(child.stdout.readline())
            others = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
            child.stdin.write("\n")
            child.stdin.flush()
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdin.close()
        child.stdout.close()
        assert others
        _, alive = psutil.wait_procs(others, timeout=60)
        assert not alive
    with Checkpoint.open(model) as checkpoint:
        encoder = VerbatimEncoder(checkpoint)
        (cut,) = build_pack(checkpoint, encoder, tmp_path / "cut", lanes=2, processes=True)
        (whole,) = build_pack(checkpoint, encoder, tmp_path / "whole")
    assert cut.read_bytes() == whole.read_bytes()
    assert list((tmp_path / "cut").iterdir()) == [cut]
