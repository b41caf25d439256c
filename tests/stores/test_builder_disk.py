"""Building packs where the folder cannot take them: full, limited, read-only, failing."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.building import after, interrupted, snapshot
from support.disks import fill_disk
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack, expected_header
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import (
    DiskFullError,
    PackWriteError,
)
from ziggurat.stores.packformat import file_bytes
from ziggurat.stores.verify import verify_pack


def test_disk_space_is_checked_first(small: Checkpoint, small_tmpfs: Path, tmp_path: Path) -> None:
    (small_tmpfs / "filler").write_bytes(bytes(1 << 20)[: (1 << 20) - 65536])
    needed = file_bytes(expected_header(small, VerbatimEncoder(small)))
    before = snapshot(small_tmpfs)
    with pytest.raises(DiskFullError) as caught:
        build_pack(small, VerbatimEncoder(small, before=after(0)), small_tmpfs / "packs")
    assert caught.value.needed == needed
    assert 0 < caught.value.available <= 65536
    assert caught.value.short == needed - caught.value.available
    assert f"{caught.value.short} bytes short" in str(caught.value)
    assert snapshot(small_tmpfs) == before
    assert not (small_tmpfs / "packs").exists()


def test_a_disk_that_fills_up_leaves_nothing_new(small: Checkpoint, small_tmpfs: Path) -> None:
    seen: list[str] = []

    def hook(name: str) -> None:
        seen.append(name)
        if len(seen) == 4:
            fill_disk(small_tmpfs)

    with pytest.raises(DiskFullError) as caught:
        build_pack(small, VerbatimEncoder(small, before=hook), small_tmpfs, threads=1)
    assert caught.value.short > 0
    assert "not enough disk space" in str(caught.value)
    assert [file.name for file in small_tmpfs.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_keeps_an_earlier_runs_rows(small: Checkpoint, small_tmpfs: Path) -> None:
    path = interrupted(small, small_tmpfs, 4)
    with pytest.raises(DiskFullError):
        build_pack(small, VerbatimEncoder(small, before=lambda _: fill_disk(small_tmpfs)), small_tmpfs)
    assert {file.name for file in small_tmpfs.iterdir()} == {"filler", path.name}
    (small_tmpfs / "filler").unlink()
    encoded: list[str] = []
    (pack,) = build_pack(small, VerbatimEncoder(small, before=encoded.append), small_tmpfs)
    assert len(encoded) == 3
    assert verify_pack(pack).ok


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_file_sizes(
    small: Checkpoint, tmp_path: Path, limit_file_size: Callable[[int], None]
) -> None:
    limit_file_size(50000)
    with pytest.raises(DiskFullError, match=r"file size limit \(ulimit -f\): .* 50000 available"):
        build_pack(small, VerbatimEncoder(small), tmp_path)
    assert snapshot(tmp_path) == {}


def test_a_limit_on_file_sizes_keeps_an_earlier_runs_rows(
    small: Checkpoint, tmp_path: Path, limit_file_size: Callable[[int], None]
) -> None:
    path = interrupted(small, tmp_path, 4)
    limit_file_size(50000)
    with pytest.raises(DiskFullError):
        build_pack(small, VerbatimEncoder(small), tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_read_only_folder(small: Checkpoint, small_tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs)], check=True)
    for folder in (small_tmpfs, small_tmpfs / "packs"):
        with pytest.raises(
            PackWriteError, match=r"Read-only file system; make it writable or choose another"
        ):
            build_pack(small, VerbatimEncoder(small, before=after(0)), folder)


def test_a_folder_without_write_permission(small: Checkpoint, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("permissions do not bind the superuser; the read-only mount covers this")
    tmp_path.chmod(0o500)
    with pytest.raises(PackWriteError, match="Permission denied"):
        build_pack(small, VerbatimEncoder(small), tmp_path)
    tmp_path.chmod(0o700)
    assert snapshot(tmp_path) == {}


def test_a_file_in_place_of_the_folder(small: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "packs").write_text("a file")
    for folder in (tmp_path / "packs", tmp_path / "packs" / "deeper"):
        with pytest.raises(PackWriteError, match="cannot be written"):
            build_pack(small, VerbatimEncoder(small), folder)
    assert snapshot(tmp_path) == {"packs": b"a file"}


def test_an_io_error_while_writing(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(PackWriteError, match="Input/output error"):
        build_pack(small, VerbatimEncoder(small), tmp_path)
    assert snapshot(tmp_path) == {}
