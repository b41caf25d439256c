"""A row that a buffer keeps is not kept by the page cache, too; asked of the kernel, on real files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.packfiles import flip, row_start
from support.page_cache import PAGE, drop, resident
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.pack import Pack, RowRequest, VerifyMode
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.readers.base import Reader
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.files import ReadableFile
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.ring import problem
from ziggurat.stores.readers.uring import UringReader

ROWS = [(0, 0), (0, 2), (1, 1)]  # no neighbours


def _pread(path: Path) -> Reader:
    reader = PreadReader(path, threads=2, direct="never")
    return _exactly(reader, reader.file)


def _uring(path: Path) -> Reader:
    if reason := problem():
        pytest.skip(reason)
    reader = UringReader(path, threads=2, direct="never")
    return _exactly(reader, reader.file)


def _exactly(reader: Reader, file: ReadableFile) -> Reader:
    """The kernel reads nothing beyond what it is asked for, so that pages tell who asked."""
    os.posix_fadvise(file.buffered, 0, 0, os.POSIX_FADV_RANDOM)
    return reader


READERS: dict[str, Callable[[Path], Reader]] = {
    "pread": _pread,
    "io_uring": _uring,
    "faults": lambda path: FaultyReader(_pread(path), {"rules": []}),
}


@pytest.fixture(params=READERS)
def pack(request: pytest.FixtureRequest, pack_copy: Path) -> Pack:
    if not drop(pack_copy):
        pytest.skip("the filesystem of the temporary folder has nothing but the page cache")
    pack = Pack.open(pack_copy, reader=READERS[request.param](pack_copy))
    drop(pack_copy)  # what opening has read
    return pack


def in_cache(pack: Pack, wanted: PackHeader) -> list[int]:
    """Of each row in ROWS: pages that the page cache has."""
    start = pack._data_start
    return [resident(pack.path, start + wanted.row_offset(*row), wanted.stride) for row in ROWS]


def read(pack: Pack, sole: list[bool]) -> None:
    stride = pack.header.stride
    requests = [
        RowRequest(*row, aligned_buffer(stride), stays) for row, stays in zip(ROWS, sole, strict=True)
    ]
    for result in pack.read_rows(requests):
        assert result.error is None


def test_rows_that_stay_in_their_buffer_leave_the_page_cache_and_others_do_not(
    pack: Pack, wanted: PackHeader
) -> None:
    whole = wanted.stride // PAGE
    assert in_cache(pack, wanted) == [0, 0, 0]
    read(pack, [True, False, True])
    assert in_cache(pack, wanted) == [0, whole, 0]
    read(pack, [False, True, True])
    assert in_cache(pack, wanted) == [whole, 0, 0]
    pack.close()


@pytest.mark.parametrize("verify", ["always", "never"])
def test_verification_does_not_matter(pack_copy: Path, wanted: PackHeader, verify: VerifyMode) -> None:
    if not drop(pack_copy):
        pytest.skip("the filesystem of the temporary folder has nothing but the page cache")
    pack = Pack.open(pack_copy, reader=_pread(pack_copy), verify=verify)
    drop(pack_copy)
    read(pack, [True, True, False])
    assert in_cache(pack, wanted) == [0, 0, wanted.stride // PAGE]
    pack.close()


def test_a_row_that_was_damaged_is_read_from_the_disk_again_and_named(
    pack_copy: Path, wanted: PackHeader
) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, *ROWS[1]))
    pack = Pack.open(pack_copy, reader=_pread(pack_copy))
    requests = [RowRequest(*row, aligned_buffer(wanted.stride), sole=True) for row in ROWS]
    found = {(end.layer, end.expert): end.error for end in pack.read_rows(requests)}
    assert [row for row, error in found.items() if error is not None] == [ROWS[1]]
    assert found[ROWS[1]].kind == "checksum"  # type: ignore[union-attr]  # the line above
    pack.close()


def test_direct_reads_ask_nothing_of_the_page_cache(pack_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PreadReader(pack_copy, direct="auto")
    if not reader.direct:
        pytest.skip("the filesystem of the temporary folder takes no direct I/O")
    forgotten: list[int] = []
    monkeypatch.setattr(ReadableFile, "forget", lambda self, offset, length: forgotten.append(offset))
    pack = Pack.open(pack_copy, reader=reader)
    read(pack, [True, True, True])
    assert forgotten == []
    reader.forget(0, PAGE)
    assert forgotten == []
    pack.close()
    reader.forget(0, PAGE)
