"""Packs copied into another folder: every row checked, nothing half-written, stopped copies continued."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.building import snapshot
from support.checkpoints import SizeArgs, write_checkpoint
from support.kill_everywhere import run_script
from support.packfiles import cut, flip, row_start
from support.progress import Recorder
from support.verbatim import VerbatimEncoder
from ziggurat.stores import copying
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.cloning import clone_file
from ziggurat.stores.copying import copy_packs
from ziggurat.stores.errors import (
    DiskFullError,
    PackLockedError,
    PackMismatchError,
    PackTruncatedError,
    RowReadError,
)
from ziggurat.stores.locking import build_lock
from ziggurat.stores.pack import Pack
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.rebuild import CheckpointRows

TESTS = Path(__file__).parents[1]


@contextmanager
def opened(*paths: Path) -> Iterator[Sequence[Pack]]:
    packs = [Pack.open(path, verify="always") for path in paths]
    try:
        yield packs
    finally:
        for pack in packs:
            pack.close()


@pytest.fixture(scope="module")
def ranks(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The packs of both ranks of two; not to be changed."""
    with Checkpoint.open(small_model) as checkpoint:
        return build_pack(checkpoint, VerbatimEncoder(checkpoint), tmp_path_factory.mktemp("ranks"), 2)


def test_copies_are_the_same_bytes(ranks: list[Path], tmp_path: Path) -> None:
    seen = Recorder()
    with opened(*ranks) as packs:
        copies = copy_packs(packs, tmp_path / "deep" / "er", seen)
    assert [path.name for path in copies] == [path.name for path in ranks]
    assert snapshot(tmp_path / "deep" / "er") == snapshot(ranks[0].parent)
    stride = packs[0].header.stride
    assert seen.calls[0] == ("start", 12, 12 * stride)
    assert seen.advanced == (12, 12 * stride)
    assert [call[0] for call in seen.calls].count("finish") == 1


def test_what_is_there_is_kept(ranks: list[Path], tmp_path: Path) -> None:
    with opened(*ranks) as packs:
        copy_packs(packs[:1], tmp_path)
        before = (tmp_path / ranks[0].name).stat()
        copy_packs(packs, tmp_path)
        assert (tmp_path / ranks[0].name).stat() == before
        assert snapshot(tmp_path) == snapshot(ranks[0].parent)
        seen = Recorder()
        copy_packs(packs, tmp_path, seen)
        assert not seen.calls


def test_something_else_under_the_name(ranks: list[Path], tmp_path: Path) -> None:
    with opened(*ranks) as packs:
        shutil.copyfile(ranks[1], tmp_path / ranks[0].name)
        with pytest.raises(PackMismatchError, match="tp_rank is 1, but 0"):
            copy_packs(packs, tmp_path)
        shutil.copyfile(ranks[0], tmp_path / ranks[0].name)
        cut(tmp_path / ranks[0].name)
        with pytest.raises(PackTruncatedError):
            copy_packs(packs, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ranks[0].name]


def test_a_bad_row_is_named_and_leaves_nothing(pack_copy: Path, wanted: PackHeader, tmp_path: Path) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 2) + 100)
    with opened(pack_copy) as packs, pytest.raises(RowReadError, match="layer 1 expert 2") as caught:
        copy_packs(packs, tmp_path / "to")
    assert caught.value.path == pack_copy
    assert not (tmp_path / "to").exists()


def test_a_bad_row_is_made_anew_where_the_checkpoint_is(
    small_model: Path, small_pack_file: Path, pack_copy: Path, wanted: PackHeader, tmp_path: Path
) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 2) + 100)
    source = Pack.open(
        pack_copy, verify="always", rebuild=CheckpointRows(small_model, wanted, VerbatimEncoder)
    )
    (copy,) = copy_packs([source], tmp_path / "to")
    source.close()
    assert copy.read_bytes() == small_pack_file.read_bytes()


def test_space_is_checked_first(
    small_pack_file: Path, small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_tmpfs / "filler").write_bytes(bytes((1 << 20) - 65536))
    with opened(small_pack_file) as packs, pytest.raises(DiskFullError, match="--to of an export"):
        copy_packs(packs, small_tmpfs / "packs")
    assert [path.name for path in small_tmpfs.iterdir()] == ["filler"]


def test_what_the_caller_will_write_counts(small_pack_file: Path, small_tmpfs: Path) -> None:
    with opened(small_pack_file) as packs:
        needed = small_pack_file.stat().st_size
        with pytest.raises(DiskFullError) as caught:
            copy_packs(packs, small_tmpfs / "packs", beside=1 << 20)
        assert caught.value.needed == needed + (1 << 20)
        assert not list(small_tmpfs.iterdir())
        copy_packs(packs, small_tmpfs / "packs", beside=(1 << 20) - needed - 65536)


def test_one_process_at_a_time(small_pack_file: Path, tmp_path: Path) -> None:
    with (
        opened(small_pack_file) as packs,
        build_lock(tmp_path / (small_pack_file.name + ".lock")),
        pytest.raises(PackLockedError),
    ):
        copy_packs(packs, tmp_path)


def interrupted(packs: Sequence[Pack], folder: Path, rows: int) -> None:
    """Leave a copy that stopped after `rows` rows."""

    class Stops(Recorder):
        def advance(self, count: int, nbytes: int) -> None:
            super().advance(count, nbytes)
            if self.advanced[0] >= rows:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_packs(packs, folder, Stops())


@pytest.mark.parametrize("rows", [1, 3, 4, 6])
def test_an_interrupted_copy_is_continued(small_pack_file: Path, tmp_path: Path, rows: int) -> None:
    with opened(small_pack_file) as packs:
        interrupted(packs, tmp_path, rows)
        assert [path.suffix for path in tmp_path.iterdir()] == [".building"]
        seen = Recorder()
        copy_packs(packs, tmp_path, seen)
    assert seen.advanced[0] == 6
    assert snapshot(tmp_path) == snapshot(small_pack_file.parent)


def test_a_row_that_went_bad_in_an_interrupted_copy_is_copied_again(
    small_pack_file: Path, wanted: PackHeader, tmp_path: Path
) -> None:
    with opened(small_pack_file) as packs:
        interrupted(packs, tmp_path, 4)
        (building,) = tmp_path.iterdir()
        flip(building, row_start(small_pack_file, wanted, 0, 1) + 7)
        copy_packs(packs, tmp_path)
    assert snapshot(tmp_path) == snapshot(small_pack_file.parent)


def test_a_pack_build_finishes_an_interrupted_copy(
    small: Checkpoint, small_pack_file: Path, tmp_path: Path
) -> None:
    with opened(small_pack_file) as packs:
        interrupted(packs, tmp_path, 4)
    encoded: list[str] = []
    build_pack(small, VerbatimEncoder(small, before=encoded.append), tmp_path)
    assert len(encoded) == 3  # the first layer was committed
    assert snapshot(tmp_path) == snapshot(small_pack_file.parent)


KILLED = """
import sys
from pathlib import Path
from support.kill_everywhere import kill_everywhere
from ziggurat.stores.copying import copy_packs
from ziggurat.stores.pack import Pack

def copy(folder):
    packs = [Pack.open(Path(path), verify="always") for path in sys.argv[2:]]
    copy_packs(packs, folder)

print(kill_everywhere(copy, Path(sys.argv[1])))
"""


def test_killed_at_every_system_call(ranks: list[Path], tmp_path: Path) -> None:
    assert run_script(KILLED, tmp_path, *ranks) > 30
    for folder in tmp_path.iterdir():
        found = {name: content for name, content in snapshot(folder).items() if not name.endswith(".lock")}
        assert found == snapshot(ranks[0].parent), folder


@pytest.fixture
def shared_blocks(tmp_path: Path) -> Iterator[Path]:
    """A real XFS, on which files can share blocks. Needs mkfs.xfs and the right to mount."""
    image, place = tmp_path / "xfs.img", tmp_path / "xfs"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    make = shutil.which("mkfs.xfs")
    for command in ([make or "", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        if make is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs mkfs.xfs and the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_copy_shares_its_blocks(shared_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    sizes: SizeArgs = {"layers": 2, "experts": 8, "hidden": 256, "intermediate": 512, "vocab": 64}
    write_checkpoint(model, **sizes)
    with Checkpoint.open(model) as checkpoint:
        (source,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), shared_blocks / "from")
    subprocess.run(["sync", "-f", str(shared_blocks)], check=True)
    before = os.statvfs(shared_blocks)
    seen = Recorder()
    nearly_all = before.f_bavail * before.f_frsize - (1 << 20)
    with opened(source) as packs:
        (copy,) = copy_packs(packs, shared_blocks / "to", seen, beside=nearly_all)
    subprocess.run(["sync", "-f", str(shared_blocks)], check=True)
    taken = (before.f_bfree - os.statvfs(shared_blocks).f_bfree) * before.f_frsize
    assert copy.read_bytes() == source.read_bytes()
    assert taken < source.stat().st_size / 4
    assert seen.advanced[0] == 16
    flip(copy, 8192)
    assert copy.read_bytes() != source.read_bytes()  # writing to one leaves the other


def copied(source: Path, target: Path) -> bool:
    """Does what a clone does on a filesystem that cannot."""
    shutil.copyfile(source, target)
    return True


@pytest.fixture
def clones(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(copying, "clone_file", copied)


def test_a_clone_is_checked(
    small_model: Path,
    small_pack_file: Path,
    pack_copy: Path,
    wanted: PackHeader,
    tmp_path: Path,
    clones: Callable[[], None],
) -> None:
    clones()
    with opened(small_pack_file) as packs:
        (copy,) = copy_packs(packs, tmp_path / "good")
        assert copy.read_bytes() == small_pack_file.read_bytes()
        interrupted(packs, tmp_path / "stopped", 2)
        copy_packs(packs, tmp_path / "stopped")
        assert snapshot(tmp_path / "stopped") == snapshot(small_pack_file.parent)
    flip(pack_copy, row_start(pack_copy, wanted, 1, 2) + 100)
    with opened(pack_copy) as packs, pytest.raises(RowReadError, match="layer 1 expert 2"):
        copy_packs(packs, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    rows = CheckpointRows(small_model, wanted, VerbatimEncoder)
    source = Pack.open(pack_copy, verify="always", rebuild=rows)
    (copy,) = copy_packs([source], tmp_path / "anew")
    source.close()
    assert copy.read_bytes() == small_pack_file.read_bytes()


def test_what_cannot_be_cloned_leaves_no_file(tmp_path: Path) -> None:
    assert not clone_file(tmp_path / "none", tmp_path / "copy")
    assert not clone_file(tmp_path, tmp_path / "copy")
    assert not clone_file(Path("/proc/self/status"), tmp_path / "copy")
    assert not list(tmp_path.iterdir())
