"""Packs that are refused, and checking whole packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from support.packfiles import (
    absent_checksum,
    cut,
    damaged_metadata,
    empty,
    extend,
    flip,
    row_start,
    unfinished,
)
from support.progress import Recorder
from ziggurat.stores.errors import (
    PackCorruptError,
    PackError,
    PackIncompleteError,
    PackMismatchError,
    PackMissingError,
    PackTruncatedError,
)
from ziggurat.stores.pack import Pack
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.verify import verify_pack

LAYERS, EXPERTS = 2, 3


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (cut, PackTruncatedError, "1 fewer than its header says"),
        (empty, PackTruncatedError, "0 bytes long"),
        (extend, PackCorruptError, "1 more than its header says"),
        (damaged_metadata, PackCorruptError, "header is damaged"),
        (absent_checksum, PackIncompleteError, "1 of 6 rows are absent"),
        (unfinished, PackIncompleteError, "was not finished"),
        (Path.unlink, PackMissingError, "no such pack"),
    ],
)
def test_damaged_packs_are_refused(
    pack_copy: Path, damage: Callable[[Path], None], error: type[PackError], says: str
) -> None:
    damage(pack_copy)
    before = {file: file.read_bytes() for file in pack_copy.parent.iterdir()}
    with pytest.raises(error, match=says) as caught:
        Pack.open(pack_copy)
    assert str(caught.value).startswith(f"{pack_copy}: ")
    assert "ziggurat pack" in str(caught.value)
    assert {file: file.read_bytes() for file in pack_copy.parent.iterdir()} == before


def test_another_models_pack_of_the_same_geometry(small_pack_file: Path, wanted: PackHeader) -> None:
    other = dataclasses.replace(wanted, identity="f" * 64)
    with pytest.raises(PackMismatchError, match="identity is") as caught:
        Pack.open(small_pack_file, expect=other)
    assert (caught.value.expected, caught.value.found) == (other.identity, wanted.identity)


def test_a_folder_is_no_pack(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"cannot be (opened|read)"):
        Pack.open(tmp_path)


def test_verify_good_pack(small_pack_file: Path, wanted: PackHeader) -> None:
    sink = Recorder()
    report = verify_pack(small_pack_file, sink)
    assert (report.ok, report.rows, report.bad) == (True, 6, [])
    assert sink.calls[0] == ("start", 6, 6 * wanted.stride)
    assert sink.calls[1:-1] == [("advance", 1, wanted.stride)] * 6
    assert sink.calls[-1] == ("finish",)


def test_verify_names_the_bad_rows(pack_copy: Path, wanted: PackHeader) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 1) + 7)
    flip(pack_copy, row_start(pack_copy, wanted, 0, 2) + 7)
    absent_checksum(pack_copy)
    report = verify_pack(pack_copy)
    assert not report.ok
    assert [(layer, expert) for layer, expert, _ in report.bad] == [(0, 2), (1, 1), (1, 2)]
    assert ["checksum" in reason for _, _, reason in report.bad] == [True, True, False]
    assert "never written" in report.bad[2][2]


def test_verify_more_rows_than_fit_in_memory(
    small_pack_file: Path, wanted: PackHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.stores.verify._BATCH_BYTES", 4 * wanted.stride)
    assert verify_pack(small_pack_file).ok


def test_verify_with_failing_reads(small_pack_file: Path) -> None:
    sink = Recorder()
    reader = FaultyReader(PreadReader(small_pack_file), {"rules": [{"kind": "error", "tags": [1]}]})
    report = verify_pack(small_pack_file, sink, reader=reader)
    assert [row[:2] for row in report.bad] == [(0, 1)]
    assert sink.calls[-1] == ("finish",)
