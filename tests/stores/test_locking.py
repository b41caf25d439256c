"""One builder per pack."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import LOCK_SUFFIX, build_pack, expected_header
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackLockedError
from ziggurat.stores.locking import build_lock
from ziggurat.stores.packformat import pack_filename

HOLD = """
import sys
from pathlib import Path
from ziggurat.stores.locking import build_lock
with build_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def lock_of(small: Checkpoint, folder: Path) -> Path:
    return folder / (pack_filename(expected_header(small, VerbatimEncoder(small))) + LOCK_SUFFIX)


def test_a_second_builder_is_told_who_the_first_is(small: Checkpoint, tmp_path: Path) -> None:
    lock = lock_of(small, tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "locked\n"
    with pytest.raises(PackLockedError, match=f"process {first.pid} is building this pack") as caught:
        build_pack(small, VerbatimEncoder(small), tmp_path)
    assert (caught.value.pid, caught.value.lock) == (first.pid, lock)
    assert list(tmp_path.iterdir()) == [lock]
    first.kill()  # the lock dies with its process, its file stays
    first.wait()
    first.stdin.close()
    first.stdout.close()
    assert lock.exists()
    (path,) = build_pack(small, VerbatimEncoder(small), tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_of_one_rank_does_not_leave_the_others(small: Checkpoint, tmp_path: Path) -> None:
    header = expected_header(small, VerbatimEncoder(small), 1, 2)
    with build_lock(tmp_path / (pack_filename(header) + LOCK_SUFFIX)):
        with pytest.raises(PackLockedError, match=f"process {os.getpid()} "):
            build_pack(small, VerbatimEncoder(small), tmp_path, 2)
        assert len(list(tmp_path.iterdir())) == 1
        build_pack(small, VerbatimEncoder(small), tmp_path, 2, [0])
    assert len(build_pack(small, VerbatimEncoder(small), tmp_path, 2)) == 2


def test_lock_without_a_readable_holder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PackLockedError, match="another process is building") as caught, build_lock(lock):
            pass
        assert caught.value.pid is None


def test_a_lock_file_removed_by_its_holder_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our lock the holder finishes and a third process makes a new file."""
    lock = tmp_path / "lock"
    lock.write_text("1\n")
    flock = fcntl.flock
    calls: list[int] = []

    def late(fd: int, operation: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            lock.unlink()
            lock.write_text("2\n")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with build_lock(lock):
        assert len(calls) == 2
        assert lock.read_text() == f"{os.getpid()}\n"
        with pytest.raises(PackLockedError), build_lock(lock):
            pass
    assert not lock.exists()


def test_a_pack_finished_while_waiting_is_not_built_again(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another builder may finish between the first look at the folder and the lock."""
    build_pack(small, VerbatimEncoder(small), tmp_path / "other")
    (done,) = (tmp_path / "other").iterdir()
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        (tmp_path / "packs" / done.name).write_bytes(done.read_bytes())
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)

    def encoded(name: str) -> None:
        raise AssertionError(f"{name} was encoded again")

    (path,) = build_pack(small, VerbatimEncoder(small, before=encoded), tmp_path / "packs")
    assert path.read_bytes() == done.read_bytes()
    assert list((tmp_path / "packs").iterdir()) == [path]
