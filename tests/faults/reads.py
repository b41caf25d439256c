"""Reads through a reader that fails by rule, of a pack whose bytes rot, while what is written back fails, too."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from os import truncate
from pathlib import Path
from typing import Any

from faults.builds import KILLS, SIZES, run_in_child_or_raise
from faults.files import FaultyFiles, Kind, run_in_child

from support.checkpoints import write_checkpoint
from support.packfiles import data_start, flip
from support.verbatim import VerbatimEncoder
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackError, RowReadError
from ziggurat.stores.pack import Pack, RowRequest, VerifyMode
from ziggurat.stores.packformat import CHECKSUM_BYTES, PackHeader
from ziggurat.stores.readers.base import DirectMode
from ziggurat.stores.readers.registry import open_reader
from ziggurat.stores.rebuild import CheckpointRows
from ziggurat.stores.verify import verify_pack

READERS = ("pread", "io_uring")
RULES = ("error", "short", "flip", "delay")
ERRORS = ("EIO", "ENOSPC", "ENODEV", "ENXIO", "ESTALE", "ENOMEM")
WRITES: tuple[Kind, ...] = (
    "none", "delay", "short", "flip", "error", "torn", "full", "kill", "torn-kill", "power"
)  # fmt: skip
MARK = b"\xaa"


@dataclass(frozen=True)
class Sound:
    """A pack as it was built. rows: each row's bytes, by its number."""

    model: Path
    header: PackHeader
    raw: bytes
    start: int
    rows: tuple[bytes, ...]

    def rebuild(self) -> CheckpointRows:
        return CheckpointRows(self.model, self.header, VerbatimEncoder)


@dataclass(frozen=True)
class Trial:
    """What is done to one pack. damaged: rows with a wrong bit on the disk. unsure: rows with one in their checksum.

    cut: what the file is cut to once it is open. rules: of `FaultyReader`. writes: what happens to the `at`-th call
    that changes a file.
    """

    reader: str
    direct: DirectMode
    threads: int
    verify: VerifyMode
    rebuild: bool
    damaged: frozenset[int]
    unsure: frozenset[int]
    cut: int | None
    rules: tuple[dict[str, Any], ...]
    writes: Kind
    at: int
    seed: int

    def may_lose(self, row: int, sound: Sound) -> bool:
        """Whether the row may fail. With the checkpoint there nothing may, but for a row of which nobody can say what
        is right: its checksum is wrong, and the disk does not give it, either."""
        end = sound.start + (row + 1) * sound.header.stride
        not_given = any(rule["kind"] != "delay" for rule in self.rules) or (
            self.cut is not None and self.cut < end
        )
        if self.rebuild:
            return row in self.unsure and not_given
        return not_given or row in self.damaged | self.unsure


def run(seed: int, count: int, work: Path) -> dict[str, object]:
    """`count` packs, damaged and read under faults, and then mended. Raises AssertionError naming the trial.

    Returns counts. Must run in a process without threads, since it forks.
    """
    sound = _build(work)
    done: Counter[str] = Counter()
    path = work / "trial" / "rows.safetensors"
    path.parent.mkdir()
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        trial = _trial(dice, sound)
        where = f"trial {number} of seed {seed}: {trial}"
        _damage(path, trial, sound)
        before = path.read_bytes()
        code, said = _in_child(work / "said", partial(_read, path, trial, sound))
        killed = code == -signal.SIGKILL and trial.writes in KILLS
        assert code == 0 or killed, f"{where}: {said or code}"
        if not trial.rebuild:
            assert path.read_bytes() == before[: trial.cut], f"{where}: the pack was written to"
        code, mended = _in_child(work / "said", partial(_mend, path, sound))
        assert code == 0, f"{where}, afterwards: {mended or code}"
        done.update(f"rule {rule['kind']}" for rule in trial.rules)
        done.update([f"reader {trial.reader}", f"write {trial.writes}", "killed" if killed else said, mended])
    return {"trials": count, "seed": seed, "ends": dict(sorted(done.items()))}


def _build(work: Path) -> Sound:
    model, folder = work / "model", work / "packs"
    write_checkpoint(model, **SIZES)

    def job() -> None:
        with Checkpoint.open(model) as checkpoint:
            build_pack(checkpoint, VerbatimEncoder(checkpoint), folder)

    run_in_child_or_raise(job)  # it starts threads
    (path,) = folder.glob("*.safetensors")
    pack = Pack.open(path)
    header = pack.header
    pack.close()
    raw, start = path.read_bytes(), data_start(path)
    rows = (raw[start + i * header.stride : start + (i + 1) * header.stride] for i in range(header.rows))
    return Sound(model, header, raw, start, tuple(rows))


def _trial(dice: random.Random, sound: Sound) -> Trial:
    rows = list(range(sound.header.rows))
    dice.shuffle(rows)
    damaged, unsure = dice.choice([0, 0, 1, 3]), dice.choice([0, 0, 0, 1])
    rules = tuple(_rule(dice, rows) for _ in range(dice.choice([0, 1, 2, 4])))
    # What a trusted row's bytes become on their way is not looked at: that is what "first-read" means.
    flips = any(rule["kind"] == "flip" for rule in rules)
    return Trial(
        reader=dice.choice(READERS),
        direct=dice.choice(["auto", "never"]),
        threads=dice.randint(1, 3),
        verify="always" if flips else dice.choice(["always", "first-read"]),
        rebuild=dice.random() < 0.7,
        damaged=frozenset(rows[:damaged]),
        unsure=frozenset(rows[damaged : damaged + unsure]),
        cut=dice.randrange(sound.start, len(sound.raw)) if dice.random() < 0.1 else None,
        rules=rules,
        writes=dice.choice(WRITES),
        at=dice.randint(1, 5),
        seed=dice.getrandbits(32),
    )


def _rule(dice: random.Random, rows: list[int]) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "kind": dice.choice(RULES),
        "after": dice.choice([0, 0, 2]),
        "probability": dice.choice([0.1, 0.5, 1.0]),
        "errno": dice.choice(ERRORS),
        "seconds": 0.001,
    }
    if dice.random() < 0.5:
        rule["tags"] = sorted(dice.sample(rows, dice.randint(1, 3)))
    if dice.random() < 0.5:
        rule["times"] = dice.randint(1, 4)
    return rule


def _damage(path: Path, trial: Trial, sound: Sound) -> None:
    dice = random.Random(trial.seed)
    path.write_bytes(sound.raw)
    stride, table = sound.header.stride, sound.start + sound.header.rows_nbytes
    for row in sorted(trial.damaged):
        flip(path, sound.start + row * stride + dice.randrange(stride), dice.randrange(8))
    for row in sorted(trial.unsure):
        flip(path, table + row * CHECKSUM_BYTES + dice.randrange(CHECKSUM_BYTES), dice.randrange(8))


def _in_child(note: Path, job: Callable[[], str]) -> tuple[int, str]:
    """The status of `job` in a process of its own, and what it returns, or the assertion that failed."""
    note.unlink(missing_ok=True)

    def noting() -> None:
        try:
            note.write_text(job())
        except AssertionError as e:
            note.write_text(f"{e}")
            raise

    code = run_in_child(noting)
    return code, note.read_text() if note.exists() else ""


def _read(path: Path, trial: Trial, sound: Sound) -> str:
    """Some batches of random rows, some of them left before their end."""
    dice = random.Random(trial.seed)
    faults = {"seed": trial.seed, "rules": list(trial.rules)}
    reader = open_reader(trial.reader, path, threads=trial.threads, direct=trial.direct, faults=faults)
    rebuild = sound.rebuild() if trial.rebuild else None
    pack = Pack.open(path, reader=reader, verify=trial.verify, rebuild=rebuild)
    if trial.cut is not None:
        truncate(path, trial.cut)
    FaultyFiles(trial.writes, trial.at, trial.seed).install()
    lost: set[int] = set()
    left: list[memoryview] = []
    for _ in range(dice.randint(1, 4)):
        rows = dice.sample(range(sound.header.rows), dice.randint(1, sound.header.rows))
        leave = dice.randrange(len(rows)) if dice.random() < 0.2 else len(rows)
        left += _batch(pack, rows, leave, trial, sound, lost)
    pack.close()
    assert all(buffer == MARK * len(buffer) for buffer in left), "a buffer was written to after its read"
    return "rows lost" if lost else "all served"


def _batch(
    pack: Pack, rows: list[int], leave: int, trial: Trial, sound: Sound, lost: set[int]
) -> list[memoryview]:
    """Read rows until `leave` of them have ended; the buffers, marked."""
    header = sound.header
    buffers = {row: aligned_buffer(header.stride) for row in rows}
    requests = [RowRequest(*divmod(row, header.experts), buffers[row]) for row in rows]
    with closing(pack.read_rows(requests)) as results:
        for ended, result in enumerate(results, 1):
            row = result.layer * header.experts + result.expert
            if result.error is None:
                assert buffers[row] == sound.rows[row], f"row {row} was served with wrong bytes"
            else:
                _named(result.error, pack.path, header)
                assert trial.may_lose(row, sound), f"row {row} was lost: {result.error}"
                lost.add(row)
            if ended == leave:
                break
    for buffer in buffers.values():
        buffer[:] = MARK * len(buffer)
    return list(buffers.values())


def _named(error: RowReadError, path: Path, header: PackHeader) -> None:
    assert error.layer_id in header.layer_ids
    assert f"layer {error.layer_id} expert {error.expert} of {path}: " in str(error), str(error)


def _mend(path: Path, sound: Sound) -> str:
    """Without faults every row comes back to what it was; a file that was cut is refused."""
    refused = ""
    try:
        report = verify_pack(path, rebuild=sound.rebuild())
    except PackError as e:
        refused = str(e)
    if refused:
        assert str(path) in refused
        # Checksums that were cut away are zeros where a later one was written again.
        lacks = len(sound.raw) - path.stat().st_size or 0 in Pack.open(path, allow_absent=True).checksums
        assert lacks, f"refused without a reason: {refused}"
        return "a cut file is refused"
    assert report.ok, f"{report.bad}"
    assert path.read_bytes() == sound.raw, "the pack is not what it was"
    return "mended" if report.mended else "sound"
