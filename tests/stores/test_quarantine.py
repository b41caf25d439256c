"""Damaged rows: kept apart, read again from the disk, made anew from the checkpoint, written back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import SizeArgs, write_checkpoint
from support.packfiles import data_start, flip, row_start
from support.verbatim import VerbatimEncoder, verbatim_row
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.counts import PackCounts
from ziggurat.stores.errors import PackTruncatedError, RebuildError, RowReadError
from ziggurat.stores.pack import Pack
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.readers.base import Arrived, ReadDone, ReadJob
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.registry import open_reader
from ziggurat.stores.rebuild import CheckpointRows

from .conftest import SMALL


def rows_of(model: Path, header: PackHeader) -> CheckpointRows:
    return CheckpointRows(model, header, VerbatimEncoder)


def expected(small: Checkpoint, layer: int, expert: int) -> torch.Tensor:
    return verbatim_row(small.expert(layer, expert), 1, 0)


def test_a_damaged_row_is_made_anew_and_written_back(
    pack_copy: Path, small_pack_file: Path, small: Checkpoint, small_model: Path, wanted: PackHeader
) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 0) + 77, 3)
    pack = Pack.open(pack_copy, rebuild=rows_of(small_model, wanted))
    assert torch.equal(pack.read_row(1, 0), expected(small, 1, 0))
    assert (pack.checksum_mismatches, pack.quarantine.rebuilt, pack.quarantine.mended) == (2, 1, 1)
    assert pack.quarantined == [(small.layer_ids[1], 0)]
    assert pack_copy.read_bytes() == small_pack_file.read_bytes()
    assert torch.equal(pack.read_row(1, 0), expected(small, 1, 0))
    assert (pack.checksum_mismatches, pack.quarantine.rebuilt, pack.quarantined) == (2, 1, [])
    pack.close()


def test_a_file_that_cannot_be_written_serves_all_the_same(
    pack_copy: Path, small: Checkpoint, small_model: Path, wanted: PackHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 0, 2))
    damaged = pack_copy.read_bytes()
    pack = Pack.open(pack_copy, rebuild=rows_of(small_model, wanted))
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_WRONLY:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    for _ in range(2):
        assert torch.equal(pack.read_row(0, 2), expected(small, 0, 2))
    assert (pack.quarantine.rebuilt, pack.quarantine.mended) == (2, 0)
    assert pack.quarantined == [(0, 2)]
    pack.close()
    assert pack_copy.read_bytes() == damaged


@pytest.mark.parametrize(
    "rule",
    [{"kind": "error", "tags": [4]}, {"kind": "short", "tags": [4]}, {"kind": "flip", "tags": [4]}],
    ids=["error", "short", "flip"],
)
def test_whatever_the_disk_does_the_checkpoint_helps(
    pack_copy: Path, small: Checkpoint, small_model: Path, wanted: PackHeader, rule: dict[str, Any]
) -> None:
    reader = FaultyReader(PreadReader(pack_copy), {"rules": [rule]})
    pack = Pack.open(pack_copy, reader=reader, rebuild=rows_of(small_model, wanted))
    assert torch.equal(pack.read_row(1, 1), expected(small, 1, 1))
    assert pack.quarantine.rebuilt == 1
    pack.close()


def test_a_damaged_checksum_does_not_damn_a_good_row(
    pack_copy: Path, small_pack_file: Path, small: Checkpoint, small_model: Path, wanted: PackHeader
) -> None:
    flip(pack_copy, pack_copy.stat().st_size - 8 * wanted.rows + 8 * 2, 5)
    pack = Pack.open(pack_copy)
    with pytest.raises(RowReadError, match="layer 0 expert 2"):
        pack.read_row(0, 2)
    pack.close()
    pack = Pack.open(pack_copy, verify="always", rebuild=rows_of(small_model, wanted))
    assert torch.equal(pack.read_row(0, 2), expected(small, 0, 2))
    assert (pack.quarantine.rebuilt, pack.quarantine.mended) == (1, 1)
    assert torch.equal(pack.read_row(0, 2), expected(small, 0, 2))
    assert (pack.quarantine.rebuilt, pack.quarantined) == (1, [])
    pack.close()
    assert pack_copy.read_bytes() == small_pack_file.read_bytes()


def replaced(pack: Path) -> bytes:
    """Another file takes the pack's name, as when somebody copies one there; its bytes."""
    other = pack.with_name("other")
    other.write_bytes(b"x" * pack.stat().st_size)
    other.rename(pack)
    return pack.read_bytes()


def truncated(pack: Path) -> bytes:
    """The file is cut within the first row; what may be there after the row was written back."""
    kept = pack.read_bytes()
    os.truncate(pack, data_start(pack) + 100)
    return kept


@pytest.mark.parametrize("reader_name", ["pread", "io_uring"])
@pytest.mark.parametrize("what", ["unlinked", "replaced", "truncated"])
def test_a_file_that_changes_under_an_open_pack(
    pack_copy: Path, small: Checkpoint, small_model: Path, wanted: PackHeader, reader_name: str, what: str
) -> None:
    """What was opened goes on being read; nothing is ever written to a file that took its place."""
    reader = open_reader(reader_name, pack_copy)
    pack = Pack.open(pack_copy, reader=reader, verify="always", rebuild=rows_of(small_model, wanted))
    flip(pack_copy, row_start(pack_copy, wanted, 0, 0))
    there: bytes | None = None
    if what == "unlinked":
        pack_copy.unlink()
    else:
        there = replaced(pack_copy) if what == "replaced" else truncated(pack_copy)
    for layer in range(wanted.layers):
        for expert in range(wanted.experts):
            assert torch.equal(pack.read_row(layer, expert), expected(small, layer, expert))
    counts = pack.counts()
    if what == "truncated":  # every row is written back, which makes the file as long as its rows again
        assert (counts.io, counts.checksum, counts.rebuilt, counts.mended) == (6, 0, 6, 6)
        assert there is not None
        end = data_start(pack_copy) + wanted.rows_nbytes
        assert pack_copy.stat().st_size == end < len(there)
        assert pack_copy.read_bytes()[data_start(pack_copy) :] == _mended(small, wanted)
        with pytest.raises(PackTruncatedError):
            Pack.open(pack_copy)
    else:
        assert (counts.io, counts.checksum, counts.reread) == (0, 2, 1)
        assert (counts.rebuilt, counts.mended) == (1, 0)
        assert not pack_copy.exists() if there is None else pack_copy.read_bytes() == there
    pack.close()


def _mended(small: Checkpoint, wanted: PackHeader) -> bytes:
    """The rows of the pack, padded."""
    rows = (expected(small, *divmod(i, wanted.experts)).numpy().tobytes() for i in range(wanted.rows))
    return b"".join(row.ljust(wanted.stride, b"\0") for row in rows)


def test_counts_say_what_reads_met(pack_copy: Path, small_model: Path, wanted: PackHeader) -> None:
    rules = [
        {"kind": "error", "tags": [0], "times": 1},
        {"kind": "short", "tags": [1], "times": 1},
        {"kind": "flip", "tags": [2], "times": 1},
        {"kind": "flip", "tags": [3], "times": 2},
    ]
    reader = FaultyReader(PreadReader(pack_copy), {"rules": rules})
    pack = Pack.open(pack_copy, reader=reader, rebuild=rows_of(small_model, wanted))
    assert pack.counts() == PackCounts()
    for layer in range(wanted.layers):
        for expert in range(wanted.experts):
            pack.read_row(layer, expert)
    found = pack.counts()
    whole = 6  # rows 4 and 5 once, rows 2 and 3 twice
    short = wanted.stride // 2 // 4096 * 4096
    assert found == PackCounts(
        read_bytes=whole * wanted.stride + short,
        io=1,
        short=1,
        checksum=3,
        reread=2,
        quarantined=2,
        rebuilt=3,
        mended=3,
    )
    pack.read_row(0, 0)
    assert pack.counts().since(found) == PackCounts(read_bytes=wanted.stride)
    pack.close()


@pytest.mark.parametrize("broken", ["gone", "cut"])
def test_a_checkpoint_that_is_lost_after_it_was_opened(
    pack_copy: Path, small: Checkpoint, small_model: Path, wanted: PackHeader, tmp_path: Path, broken: str
) -> None:
    """It is read, not mapped: a file that shrinks is an error of the row and not the end of the process."""
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    (weights,) = model.glob("*.safetensors")
    pack = Pack.open(pack_copy, verify="always", rebuild=rows_of(model, wanted))
    for expert in range(2):
        flip(pack_copy, row_start(pack_copy, wanted, 1, expert))
    assert torch.equal(pack.read_row(1, 0), expected(small, 1, 0))
    if broken == "gone":
        weights.unlink()
    else:
        os.truncate(weights, 4096)
    with pytest.raises(RowReadError, match=r"layer 1 expert 1 .* cannot be made anew from"):
        pack.read_row(1, 1)
    pack.close()


def test_another_checkpoint_is_not_believed(pack_copy: Path, wanted: PackHeader, tmp_path: Path) -> None:
    sizes: SizeArgs = {**SMALL, "vocab": 65}
    write_checkpoint(tmp_path / "other", **sizes)
    flip(pack_copy, row_start(pack_copy, wanted, 1, 0))
    pack = Pack.open(pack_copy, rebuild=rows_of(tmp_path / "other", wanted))
    with pytest.raises(RowReadError, match=r"layer 1 expert 0 .* it is another checkpoint by now"):
        pack.read_row(1, 0)
    pack.close()


def test_a_checkpoint_that_is_gone(pack_copy: Path, wanted: PackHeader, tmp_path: Path) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 0))
    pack = Pack.open(pack_copy, rebuild=rows_of(tmp_path / "gone", wanted))
    with pytest.raises(RowReadError, match="cannot be made anew") as caught:
        pack.read_row(1, 0)
    assert caught.value.kind == "checksum"
    pack.close()


def test_a_rebuild_that_gives_other_bytes_is_not_believed(pack_copy: Path, wanted: PackHeader) -> None:
    def zeros(layer: int, expert: int, buffer: memoryview) -> None:
        buffer[:] = bytes(len(buffer))

    flip(pack_copy, row_start(pack_copy, wanted, 0, 0))
    damaged = pack_copy.read_bytes()
    pack = Pack.open(pack_copy, rebuild=zeros)
    with pytest.raises(RowReadError, match="which is neither"):
        pack.read_row(0, 0)
    assert pack.quarantine.rebuilt == 0
    pack.close()
    assert pack_copy.read_bytes() == damaged


def test_a_codec_of_another_version_is_not_used(small_model: Path, wanted: PackHeader) -> None:
    rows = CheckpointRows(small_model, wanted, lambda opened: VerbatimEncoder(opened, version="2"))
    with pytest.raises(RebuildError, match="its codec is of version 2 by now"):
        rows(0, 0, aligned_buffer(wanted.stride))


class Recording:
    """A reader that notes what is read, and whether from the disk."""

    name = "recording"
    direct = False

    def __init__(self, inner: PreadReader) -> None:
        self.inner = inner
        self.calls: list[tuple[list[int], bool]] = []

    def read(
        self, jobs: Iterable[ReadJob], arrived: Arrived | None = None, *, fresh: bool = False
    ) -> Generator[ReadDone]:
        work = list(jobs)
        self.calls.append(([job.tag for job in work], fresh))
        return self.inner.read(work, arrived, fresh=fresh)

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        self.calls.append(([offset for offset, _ in pieces], False))
        return self.inner.read_ahead(pieces)

    def forget(self, offset: int, nbytes: int) -> None:
        self.inner.forget(offset, nbytes)

    def close(self) -> None:
        self.inner.close()


def test_quarantine_reads_past_caches_and_ends_with_a_good_read(pack_copy: Path, wanted: PackHeader) -> None:
    at = row_start(pack_copy, wanted, 1, 2)
    flip(pack_copy, at)
    reader = Recording(PreadReader(pack_copy, direct="never"))
    pack = Pack.open(pack_copy, reader=reader)
    with pytest.raises(RowReadError):
        pack.read_row(1, 2)
    assert reader.calls == [([5], False), ([5], True)]
    assert pack.quarantined == [(1, 2)]
    reader.calls.clear()
    flip(pack_copy, at)  # put right by somebody
    pack.read_row(1, 2)
    pack.read_row(1, 2)
    assert reader.calls == [([5], True), ([5], False)]
    assert pack.quarantined == []
    pack.close()


@pytest.mark.parametrize("reader_name", ["pread", "io_uring"])
def test_whole_layers_into_one_piece_of_memory(
    small_pack_file: Path, wanted: PackHeader, reader_name: str
) -> None:
    pack = Pack.open(small_pack_file, reader=open_reader(reader_name, small_pack_file))
    memory = aligned_buffer(2 * wanted.experts * wanted.stride)
    for result in pack.read_layers([1, 0], memory):
        assert result.error is None
    raw = small_pack_file.read_bytes()
    size = wanted.experts * wanted.stride
    for place, layer in enumerate([1, 0]):
        start = row_start(small_pack_file, wanted, layer, 0)
        assert memory[place * size : (place + 1) * size].tobytes() == raw[start : start + size]
    with pytest.raises(ValueError, match=f"memory of {2 * size} bytes"):
        pack.read_layers([0, 1], memory[:-1])
    pack.close()


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_reading_ahead_merges_neighbours(small_pack_file: Path, wanted: PackHeader, direct: str) -> None:
    inner = PreadReader(small_pack_file, direct=direct)  # type: ignore[arg-type]  # a parameter
    reader = Recording(inner)
    pack = Pack.open(small_pack_file, reader=reader)
    started = pack.read_ahead([(1, 1), (0, 0), (0, 1), (0, 1)])
    assert started is not inner.direct
    first = row_start(small_pack_file, wanted, 0, 0)
    assert reader.calls == [([first, row_start(small_pack_file, wanted, 1, 1)], False)]
    pack.close()


def test_nothing_is_checked_and_nothing_quarantined_with_never(
    small_pack_file: Path, small_model: Path, wanted: PackHeader, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(small_pack_file, tmp_path))
    flip(copy, row_start(copy, wanted, 0, 0))
    pack = Pack.open(copy, verify="never", rebuild=rows_of(small_model, wanted))
    pack.read_row(0, 0)
    assert (pack.quarantined, pack.quarantine.rebuilt) == ([], 0)
    pack.close()
