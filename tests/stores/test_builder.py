"""Building packs: contents, resuming, errors that leave the folder as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from support.building import Stop, after, interrupted, snapshot
from support.checkpoints import Layout, SizeArgs, write_checkpoint
from support.progress import Recorder
from support.verbatim import VerbatimEncoder, verbatim_row
from ziggurat.stores.builder import build_pack, default_threads, expected_header, peak_bytes
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import (
    PackMismatchError,
    PackTruncatedError,
)
from ziggurat.stores.pack import Pack
from ziggurat.stores.packformat import file_bytes, row_digest
from ziggurat.stores.stored import StoredExpert
from ziggurat.stores.verify import verify_pack

ROWS = 6  # of the small model


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_rows(small: Checkpoint, tmp_path: Path, tp_size: int, threads: int) -> None:
    sink = Recorder()
    encoder = VerbatimEncoder(small)
    paths = build_pack(small, encoder, tmp_path, tp_size, progress=sink, threads=threads)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for rank, path in enumerate(paths):
        expected = expected_header(small, encoder, rank, tp_size)
        pack = Pack.open(path, expect=expected, verify="always")
        for layer in range(2):
            for expert in range(3):
                payload = verbatim_row(small.expert(layer, expert), tp_size, rank)
                assert torch.equal(pack.read_row(layer, expert), payload)
        pack.close()
        assert path.stat().st_size == file_bytes(expected)
        assert verify_pack(path).ok
        stride = expected.stride
    total = ROWS * tp_size
    assert sink.calls[0] == ("start", total, total * stride)
    assert sink.advanced == (total, total * stride)
    assert sink.calls[-1] == ("finish",)


def test_the_same_bytes_whatever_the_threads_and_ranks(small: Checkpoint, tmp_path: Path) -> None:
    encoder = VerbatimEncoder(small)
    both = build_pack(small, encoder, tmp_path / "both", 2, threads=3)
    (second,) = build_pack(small, encoder, tmp_path / "second", 2, [1], threads=1)
    swapped = build_pack(small, encoder, tmp_path / "swapped", 2, [1, 0])
    assert second.read_bytes() == both[1].read_bytes()
    assert [path.name for path in swapped] == [path.name for path in reversed(both)]
    assert snapshot(tmp_path / "swapped") == snapshot(tmp_path / "both")


def test_bytes_an_encoder_leaves_alone_are_zero(small: Checkpoint, tmp_path: Path) -> None:
    class Sparse(VerbatimEncoder):
        """Fills only the first byte of the first expert."""

        def encode(self, expert: StoredExpert, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
            if expert.w1.name == "model.layers.0.mlp.experts.0.gate_proj.weight":
                outs[0].fill_(7)
            else:
                outs[0][0] = 9

    (path,) = build_pack(small, Sparse(small), tmp_path, threads=1)
    pack = Pack.open(path)
    rows = [pack.read_row(*divmod(i, 3)) for i in range(ROWS)]
    pack.close()
    assert int(rows[0].sum()) == 7 * len(rows[0])
    assert [int(row.sum()) for row in rows[1:]] == [9] * 5


def test_a_pack_that_is_there_is_kept(small: Checkpoint, tmp_path: Path) -> None:
    (path,) = build_pack(small, VerbatimEncoder(small), tmp_path)
    before = path.stat()
    sink = Recorder()
    encoder = VerbatimEncoder(small, before=after(0))
    assert build_pack(small, encoder, tmp_path, progress=sink) == [path]
    now = path.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert sink.calls == []


def test_only_the_missing_rank_is_built(small: Checkpoint, tmp_path: Path) -> None:
    paths = build_pack(small, VerbatimEncoder(small), tmp_path, 2)
    before, kept = snapshot(tmp_path), paths[0].stat()
    paths[1].unlink()
    sink = Recorder()
    assert build_pack(small, VerbatimEncoder(small), tmp_path, 2, progress=sink) == paths
    assert snapshot(tmp_path) == before
    assert paths[0].stat() == kept
    assert sink.calls[0][1] == ROWS


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: os.truncate(path, 5000), PackTruncatedError),
        (None, PackMismatchError),
    ],
)
def test_a_bad_pack_that_is_there_is_an_error_unless_rebuilt(
    small: Checkpoint, tmp_path: Path, damage: Callable[[Path], None] | None, error: type[Exception]
) -> None:
    encoder = VerbatimEncoder(small)
    (path,) = build_pack(small, encoder, tmp_path)
    good = snapshot(tmp_path)
    if damage is None:
        encoder = VerbatimEncoder(small, version="2")
    else:
        damage(path)
    before = snapshot(tmp_path)
    with pytest.raises(error):
        build_pack(small, encoder, tmp_path)
    assert snapshot(tmp_path) == before
    assert build_pack(small, encoder, tmp_path, rebuild=True) == [path]
    assert Pack.open(path, expect=expected_header(small, encoder)).header.codec_version == encoder.version
    if damage is not None:
        assert snapshot(tmp_path) == good


def test_a_failed_rebuild_leaves_the_old_pack(small: Checkpoint, tmp_path: Path) -> None:
    build_pack(small, VerbatimEncoder(small), tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(Stop):
        build_pack(small, VerbatimEncoder(small, before=after(3)), tmp_path, rebuild=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_an_encoders_error_leaves_nothing_behind(small: Checkpoint, tmp_path: Path, count: int) -> None:
    (tmp_path / "other").write_text("kept")
    sink = Recorder()
    before = torch.get_num_threads()
    with pytest.raises(Stop, match=r"model\.layers"):
        build_pack(small, VerbatimEncoder(small, before=after(count)), tmp_path, 2, progress=sink)
    assert snapshot(tmp_path) == {"other": b"kept"}
    assert sink.calls[-1] == ("finish",)
    assert torch.get_num_threads() == before


def test_folders_this_run_made_go_with_it(small: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        build_pack(small, VerbatimEncoder(small, before=after(0)), tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    build_pack(small, VerbatimEncoder(small), tmp_path / "a" / "b")
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_an_interrupted_build_is_continued(
    small: Checkpoint, tmp_path: Path, count: int, tp_size: int
) -> None:
    interrupted(small, tmp_path / "cut", count, tp_size)
    sink = Recorder()
    encoded: list[str] = []
    encoder = VerbatimEncoder(small, before=encoded.append)
    build_pack(small, encoder, tmp_path / "cut", tp_size, progress=sink)
    build_pack(small, VerbatimEncoder(small), tmp_path / "whole", tp_size)
    assert snapshot(tmp_path / "cut") == snapshot(tmp_path / "whole")
    # The unit of what is kept is a layer: rows of a layer are synced together.
    left = ROWS - count // 3 * 3
    assert len(encoded) == left
    assert sink.calls[0][1] == left * tp_size


def test_an_error_in_a_continued_build_keeps_the_good_rows(small: Checkpoint, tmp_path: Path) -> None:
    path = interrupted(small, tmp_path, 4)
    with pytest.raises(Stop):
        build_pack(small, VerbatimEncoder(small, before=after(1)), tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    encoded: list[str] = []
    build_pack(small, VerbatimEncoder(small, before=encoded.append), tmp_path)
    assert len(encoded) == 3


def stale_version(path: Path, small: Checkpoint) -> None:
    other = path.parent / "other"
    interrupted_other = VerbatimEncoder(small, version="0", before=after(4, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_pack(small, interrupted_other, other, threads=1)
    shutil.move(next(other.glob("*.building")), path)
    shutil.rmtree(other)


def garbage(path: Path, small: Checkpoint) -> None:
    path.write_bytes(b"garbage" * 100000)


def cut_short(path: Path, small: Checkpoint) -> None:
    os.truncate(path, path.stat().st_size - 1)


def header_only(path: Path, small: Checkpoint) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("spoil", [stale_version, garbage, cut_short, header_only])
def test_an_unfinished_file_that_does_not_fit_is_started_anew(
    small: Checkpoint, tmp_path: Path, spoil: Callable[[Path, Checkpoint], None]
) -> None:
    spoil(interrupted(small, tmp_path / "a", 4), small)
    encoded: list[str] = []
    build_pack(small, VerbatimEncoder(small, before=encoded.append), tmp_path / "a")
    build_pack(small, VerbatimEncoder(small), tmp_path / "b")
    assert len(encoded) == ROWS
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_rebuild_trusts_no_unfinished_file(small: Checkpoint, tmp_path: Path) -> None:
    interrupted(small, tmp_path, 4)
    encoded: list[str] = []
    build_pack(small, VerbatimEncoder(small, before=encoded.append), tmp_path, rebuild=True)
    assert len(encoded) == ROWS


def test_a_checksum_is_written_only_after_its_rows_were_synced(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that makes a checksum trustworthy after a power cut."""
    events: list[tuple[str, int, int]] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync

    def recording_pwrite(fd: int, data: bytes, offset: int) -> int:
        done = pwrite(fd, data, offset)
        events.append(("write", fd, offset))
        return done

    def recording_fdatasync(fd: int) -> None:
        position = len(events)  # what is written after the sync began may not be covered by it
        fdatasync(fd)
        events.insert(position, ("sync", fd, 0))

    monkeypatch.setattr(os, "pwrite", recording_pwrite)
    monkeypatch.setattr(os, "fdatasync", recording_fdatasync)
    paths = build_pack(small, VerbatimEncoder(small), tmp_path, 2, threads=2)
    header = Pack.open(paths[0]).header
    start = paths[0].stat().st_size - header.rows_nbytes - header.rows * 8
    table = start + header.rows_nbytes
    files = {fd for _, fd, offset in events if offset >= table}
    assert len(files) == 2
    for fd in files:
        for layer in range(2):
            checked = events.index(("write", fd, table + layer * 3 * 8))
            synced = max(i for i, event in enumerate(events[:checked]) if event == ("sync", fd, 0))
            for expert in range(3):
                assert events.index(("write", fd, start + header.row_offset(layer, expert))) < synced


def test_short_writes_are_continued(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    build_pack(small, VerbatimEncoder(small), tmp_path / "whole")
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:777], at))
    build_pack(small, VerbatimEncoder(small), tmp_path / "short")
    assert snapshot(tmp_path / "short") == snapshot(tmp_path / "whole")


def test_a_digest_of_zero_is_stored_as_one(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row with digest 0 is known, so the hash function is made to return it."""
    monkeypatch.setattr("ziggurat.stores.packformat.xxhash.xxh3_64_intdigest", lambda _: 0)
    assert row_digest(memoryview(b"row")) == 1
    (path,) = build_pack(small, VerbatimEncoder(small), tmp_path)
    assert (Pack.open(path).checksums == 1).all()
    assert verify_pack(path).ok


def test_encoders_that_cannot_do_the_size(small: Checkpoint, tmp_path: Path) -> None:
    class Picky(VerbatimEncoder):
        def row_bytes(self, tp_size: int) -> int:
            raise ValueError(f"cannot be split in {tp_size}")

    with pytest.raises(ValueError, match="split in 3"):
        build_pack(small, Picky(small), tmp_path / "packs", 3)
    assert list(tmp_path.iterdir()) == []


def test_peak_bytes(small: Checkpoint) -> None:
    encoder = VerbatimEncoder(small)
    base = 2 * small.layer_bytes(0)
    assert small.layer_bytes(0) == 3 * 3 * 96 * 32 * 2
    one = peak_bytes(small, encoder, threads=1)
    assert one == base + 20480 + 16 * 96 * 32
    assert peak_bytes(small, encoder, threads=3) == base + 3 * (one - base)
    assert peak_bytes(small, encoder, 2, threads=1) == base + 2 * 12288 + 16 * 96 * 32
    assert peak_bytes(small, encoder, 2, [1], threads=1) == base + 12288 + 16 * 96 * 32
    assert peak_bytes(small, encoder) == peak_bytes(small, encoder, threads=default_threads())


@pytest.mark.parametrize("layout", ["per-expert", "fused"])
def test_layouts_give_the_same_rows(tmp_path: Path, layout: Layout) -> None:
    sizes: SizeArgs = {"layers": 2, "experts": 3, "top_k": 2, "hidden": 96, "intermediate": 32, "vocab": 64}
    write_checkpoint(tmp_path / "model", layout=layout, shards=2, **sizes)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        (path,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), tmp_path)
        pack = Pack.open(path)
        for i in range(ROWS):
            payload = verbatim_row(checkpoint.expert(*divmod(i, 3)), 1, 0)
            assert torch.equal(pack.read_row(*divmod(i, 3)), payload)
        pack.close()
