"""Builds that meet a fault at a random system call, and are then finished: the packs must be the same bytes."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

from faults.files import FaultyFiles, Kind, contents, run_in_child

from support.checkpoints import SizeArgs, write_checkpoint
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackError
from ziggurat.stores.verify import verify_pack

SIZES: SizeArgs = {"layers": 3, "experts": 4, "top_k": 2, "hidden": 96, "intermediate": 32, "vocab": 64}
KINDS: tuple[Kind, ...] = (
    "kill", "torn-kill", "power", "error", "torn", "full", "short", "delay", "flip"
)  # fmt: skip
KILLS: tuple[Kind, ...] = ("kill", "torn-kill", "power")
TP = 2


def run(seed: int, count: int, work: Path, kinds: tuple[Kind, ...] = KILLS) -> dict[str, object]:
    """Disturb `count` builds, each up to three times, and finish them. Raises AssertionError naming the build's number.

    Returns counts. Must run in a process without threads, since it forks.
    """
    model = work / "model"
    write_checkpoint(model, **SIZES)
    run_in_child_or_raise(partial(_build, model, work / "whole"))
    expected = contents(work / "whole")
    assert len(expected) == TP
    calls = _calls(model, work / "count")
    done: Counter[str] = Counter()
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        folder = work / "build"
        kind = dice.choice(kinds)
        for _ in range(1 if kind == "flip" else dice.randint(1, 3)):
            fault = FaultyFiles(kind, dice.randrange(1, calls + 1), dice.getrandbits(32))
            code = run_in_child(partial(_build, model, folder, fault))
            _check_code(number, kind, code)
            done[f"{kind}: {'killed' if code < 0 else 'failed' if code else 'finished'}"] += 1
        where = f"build {number} of seed {seed} ({kind})"
        if kind == "flip":
            _flips_are_named(folder, expected, where)
        else:
            run_in_child_or_raise(partial(_build, model, folder))
            assert contents(folder) == expected, f"{where} is not the same bytes"
        shutil.rmtree(folder)
    return {"builds": count, "seed": seed, "system_calls": calls, "ends": dict(sorted(done.items()))}


def _build(model: Path, folder: Path, fault: FaultyFiles | None = None) -> None:
    if fault is not None:
        fault.install()
    with Checkpoint.open(model) as checkpoint:
        build_pack(checkpoint, VerbatimEncoder(checkpoint), folder, TP, threads=2)


def _flips_are_named(folder: Path, expected: dict[str, bytes], where: str) -> None:
    """A bit that flips on its way to the disk is not seen by the build, but by whoever reads the pack."""
    found = contents(folder)
    assert found.keys() == expected.keys(), where
    for name in expected:
        try:
            sound = verify_pack(folder / name).ok
        except PackError:
            sound = False
        assert sound == (found[name] == expected[name]), f"{where}: {name} is said to be {sound=}"


def _calls(model: Path, folder: Path) -> int:
    """How many calls that change files a whole build makes."""
    note = folder.with_suffix(".calls")

    def job() -> None:
        counting = FaultyFiles("none", 0, 0)
        _build(model, folder, counting)
        note.write_text(str(counting.calls))

    run_in_child_or_raise(job)
    return int(note.read_text())


def _check_code(number: int, kind: Kind, code: int) -> None:
    if kind in KILLS:  # a later attempt may have less left to do than the call it should be killed at
        assert code in (0, -signal.SIGKILL), f"build {number}: status {code}"
    elif kind in ("short", "delay", "flip"):
        assert code == 0, f"build {number}: a {kind} write is no reason to fail"
    else:
        assert code in (0, 1), f"build {number}: status {code}"


def run_in_child_or_raise(job: partial[None] | object) -> None:
    assert callable(job)
    code = run_in_child(job)
    assert code == 0, f"a build without faults ended with status {code}"
