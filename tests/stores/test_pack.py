"""Opening packs and reading rows from them."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.packfiles import (
    cut,
    data_start,
    flip,
    row_start,
)
from support.verbatim import verbatim_row
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import (
    PackTruncatedError,
    RowReadError,
)
from ziggurat.stores.pack import Pack, RowRequest, VerifyMode
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.registry import open_reader
from ziggurat.stores.readers.ring import problem

LAYERS, EXPERTS = 2, 3


def request_all(header: PackHeader) -> list[RowRequest]:
    return [
        RowRequest(layer, expert, aligned_buffer(header.stride))
        for layer in range(header.layers)
        for expert in range(header.experts)
    ]


def faulty(path: Path, *rules: dict[str, Any], verify: VerifyMode = "first-read") -> Pack:
    reader = FaultyReader(PreadReader(path, threads=2), {"rules": list(rules)})
    return Pack.open(path, reader=reader, verify=verify)


def errors(pack: Pack) -> dict[tuple[int, int], RowReadError | None]:
    return {(r.layer, r.expert): r.error for r in pack.read_rows(request_all(pack.header))}


def bad(pack: Pack) -> dict[tuple[int, int], str]:
    """Rows that could not be read -> kind of failure."""
    return {row: error.kind for row, error in errors(pack).items() if error is not None}


@pytest.mark.parametrize("verify", ["always", "first-read", "never"])
def test_rows_are_the_encoders_bytes(
    small_pack_file: Path, small: Checkpoint, wanted: PackHeader, verify: VerifyMode
) -> None:
    pack = Pack.open(small_pack_file, expect=wanted, verify=verify)
    assert pack.header == wanted
    for _ in range(2):
        requests = request_all(wanted)
        results = list(pack.read_rows(requests))
        assert sorted((r.layer, r.expert) for r in results) == [(q.layer, q.expert) for q in requests]
        for result in results:
            assert (result.error, result.nbytes, result.seconds >= 0) == (None, wanted.stride, True)
        for layer, expert, buffer, *_ in requests:
            payload = verbatim_row(small.expert(layer, expert), 1, 0)
            row = torch.frombuffer(buffer, dtype=torch.uint8)
            assert torch.equal(row[: wanted.row_bytes], payload)
            assert not row[wanted.row_bytes :].any()
            assert torch.equal(pack.read_row(layer, expert), payload)
    assert pack.checksum_mismatches == 0
    pack.close()


def test_larger_buffers_keep_what_is_behind_the_row(small_pack_file: Path) -> None:
    pack = Pack.open(small_pack_file)
    stride = pack.header.stride
    buffer = memoryview(bytearray(b"\xaa" * (stride + 10)))
    list(pack.read_rows([RowRequest(1, 2, buffer)]))
    pack.close()
    assert buffer[stride:].tobytes() == b"\xaa" * 10
    at = row_start(small_pack_file, pack.header, 1, 2)
    assert buffer[:stride].tobytes() == small_pack_file.read_bytes()[at : at + stride]


def test_arena_like_buffers(small_pack_file: Path) -> None:
    pack = Pack.open(small_pack_file)
    arena = torch.zeros(6, pack.header.stride, dtype=torch.uint8)
    views = [arena[place].numpy().data for place in range(6)]
    for result in pack.read_rows([RowRequest(*divmod(i, EXPERTS), views[i]) for i in range(6)]):
        assert result.error is None
    for i in range(6):
        assert torch.equal(arena[i][: pack.header.row_bytes], pack.read_row(*divmod(i, EXPERTS)))
    pack.close()


@pytest.mark.parametrize(
    ("layer", "expert", "size", "error"),
    [
        (LAYERS, 0, None, IndexError),
        (-1, 0, None, IndexError),
        (0, EXPERTS, None, IndexError),
        (0, -1, None, IndexError),
        (0, 1, -1, ValueError),
        (0, 0, None, ValueError),  # wanted twice
    ],
)
def test_impossible_requests(
    small_pack_file: Path, layer: int, expert: int, size: int | None, error: type[Exception]
) -> None:
    pack = Pack.open(small_pack_file)
    good = aligned_buffer(pack.header.stride)
    buffer = memoryview(bytearray(pack.header.stride + (size or 0)))
    with pytest.raises(error):
        pack.read_rows([RowRequest(0, 0, good), RowRequest(layer, expert, buffer)])
    assert not any(good)
    pack.close()


def test_read_only_buffers_are_refused(small_pack_file: Path) -> None:
    pack = Pack.open(small_pack_file)
    with pytest.raises(ValueError, match="writable"):
        pack.read_rows([RowRequest(0, 0, memoryview(bytes(pack.header.stride)))])
    pack.close()


def test_a_flipped_bit_in_a_row_is_that_rows_error(pack_copy: Path, wanted: PackHeader) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 0) + 1000, 5)
    pack = Pack.open(pack_copy, expect=wanted)
    found = errors(pack)
    error = found.pop((1, 0))
    assert error is not None
    assert (error.kind, error.layer_id, error.expert, error.path) == ("checksum", 1, 0, pack_copy)
    assert all(text in str(error) for text in ("layer 1 expert 0", str(pack_copy), "checksum", "ziggurat"))
    assert not any(found.values())
    assert pack.checksum_mismatches == 2  # the row was read twice
    with pytest.raises(RowReadError, match="layer 1 expert 0"):
        pack.read_row(1, 0)
    pack.close()


def test_a_flipped_bit_in_the_padding_counts_too(pack_copy: Path, wanted: PackHeader) -> None:
    assert wanted.stride > wanted.row_bytes
    flip(pack_copy, row_start(pack_copy, wanted, 0, 1) + wanted.stride - 1)
    pack = Pack.open(pack_copy)
    assert bad(pack) == {(0, 1): "checksum"}
    pack.close()


def test_never_does_not_look_at_checksums(pack_copy: Path, wanted: PackHeader) -> None:
    flip(pack_copy, row_start(pack_copy, wanted, 1, 0))
    pack = Pack.open(pack_copy, verify="never")
    assert bad(pack) == {}
    pack.close()


def test_first_read_stops_checking_rows_that_were_good(pack_copy: Path, wanted: PackHeader) -> None:
    pack = Pack.open(pack_copy, verify="first-read")
    pack.read_row(0, 0)
    for expert in (0, 1):
        flip(pack_copy, row_start(pack_copy, wanted, 0, expert))
    assert bad(pack) == {(0, 1): "checksum"}
    assert bad(pack) == {(0, 1): "checksum"}  # a bad row stays checked
    pack.close()


def test_always_goes_on_checking(pack_copy: Path, wanted: PackHeader) -> None:
    pack = Pack.open(pack_copy, verify="always")
    assert bad(pack) == {}
    flip(pack_copy, row_start(pack_copy, wanted, 0, 0))
    assert bad(pack) == {(0, 0): "checksum"}
    pack.close()


def test_a_wrong_checksum_is_read_again_once(small_pack_file: Path) -> None:
    pack = faulty(small_pack_file, {"kind": "flip", "tags": [4], "times": 1})
    assert bad(pack) == {}
    assert pack.checksum_mismatches == 1
    pack.close()
    pack = faulty(small_pack_file, {"kind": "flip", "tags": [4], "times": 2})
    assert bad(pack) == {(1, 1): "checksum"}
    assert bad(pack) == {}
    assert pack.checksum_mismatches == 2
    pack.close()


def test_the_buffer_holds_the_row_after_the_second_read(small_pack_file: Path) -> None:
    pack = faulty(small_pack_file, {"kind": "flip", "times": 1})
    good = Pack.open(small_pack_file)
    assert torch.equal(pack.read_row(0, 2), good.read_row(0, 2))
    pack.close()
    good.close()


def test_io_errors_and_short_reads_are_not_retried(small_pack_file: Path) -> None:
    pack = faulty(
        small_pack_file,
        {"kind": "error", "tags": [0], "times": 1},
        {"kind": "short", "tags": [5], "times": 1},
        verify="never",
    )
    assert bad(pack) == {(0, 0): "io", (1, 2): "short"}
    assert bad(pack) == {}
    pack.close()


def test_an_io_error_in_the_second_read(small_pack_file: Path) -> None:
    pack = faulty(
        small_pack_file,
        {"kind": "flip", "tags": [3], "times": 1},
        {"kind": "error", "tags": [3], "after": 1},
    )
    found = {row: error for row, error in errors(pack).items() if error is not None}
    pack.close()
    assert {row: error.kind for row, error in found.items()} == {(1, 0): "io"}
    assert "Input/output error" in found[1, 0].reason


def test_leaving_early_joins(small_pack_file: Path) -> None:
    release = threading.Event()
    active: set[int] = set()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        me = threading.get_ident()
        if offset > data_start(small_pack_file):
            active.add(me)
            release.wait(60)
            active.discard(me)
        return os.preadv(fd, buffers, offset)

    pack = Pack.open(small_pack_file, reader=PreadReader(small_pack_file, threads=4, preadv=preadv))
    rows = pack.read_rows(request_all(pack.header))
    assert next(rows).error is None
    at_return: list[int] = []

    def leave() -> None:
        rows.close()
        at_return.append(len(active))

    leaver = threading.Thread(target=leave)
    leaver.start()
    leaver.join(0.2)
    release.set()
    leaver.join()
    assert at_return == [0]
    pack.close()


def test_concurrent_callers(small_pack_file: Path) -> None:
    pack = faulty(small_pack_file, {"kind": "flip", "probability": 0.3}, verify="always")
    expected = {row: Pack.open(small_pack_file).read_row(*row) for row in ((0, 1), (1, 2), (1, 0))}
    results: list[bool] = []

    def run() -> None:
        for _ in range(10):
            for row, payload in expected.items():
                try:
                    results.append(torch.equal(pack.read_row(*row), payload))
                except RowReadError as e:
                    results.append(e.kind == "checksum")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pack.close()
    assert results == [True] * 120


def test_an_unknown_verify_mode(small_pack_file: Path) -> None:
    with pytest.raises(ValueError, match="verify is 'sometimes'"):
        Pack.open(small_pack_file, verify="sometimes")  # type: ignore[arg-type]  # wrong on purpose


def test_a_failed_open_closes_the_reader(pack_copy: Path) -> None:
    reader = PreadReader(pack_copy)
    cut(pack_copy)
    with pytest.raises(PackTruncatedError):
        Pack.open(pack_copy, reader=reader)
    with pytest.raises(ValueError, match="closed"):
        list(reader.read([]))


@pytest.mark.parametrize("framework", ["numpy", "pt"])
def test_any_safetensors_tool_can_open_a_pack(
    small_pack_file: Path, wanted: PackHeader, framework: str
) -> None:
    from safetensors import safe_open

    with safe_open(small_pack_file, framework=framework) as file:
        rows, checksums = file.get_tensor("rows"), file.get_tensor("checksums")
        assert tuple(rows.shape) == (2, 3, wanted.stride)
        assert tuple(checksums.shape) == (2, 3)
        assert str(checksums.dtype).endswith("uint64")
        assert file.metadata()["identity"] == wanted.identity
        assert file.metadata()["layer_ids"] == "[0, 1]"
    assert data_start(small_pack_file) % 4096 == 0


def test_a_reader_that_cannot_go_on_loses_rows_and_nothing_else(
    small_pack_file: Path, wanted: PackHeader
) -> None:
    """Without a free descriptor io_uring cannot have a ring."""
    if problem() is not None:
        pytest.skip("needs io_uring")
    pack = Pack.open(small_pack_file, reader=open_reader("io_uring", small_pack_file))
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(used)]  # no gap is left below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, before[1]))
    try:
        failed = errors(pack)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)
    assert len(failed) == wanted.rows
    for error in failed.values():
        assert error is not None
        assert error.kind == "io"
        assert "Too many open files" in str(error)
    assert pack.counts().io == wanted.rows
    assert errors(pack) == dict.fromkeys(failed)
    pack.close()
