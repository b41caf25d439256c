"""The bytes of a pack file's header."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.stores.errors import PackCorruptError, PackError, PackMismatchError, PackTruncatedError
from ziggurat.stores.packformat import (
    ALIGNMENT,
    PackHeader,
    check_expected,
    file_bytes,
    header_bytes,
    pack_filename,
    read_pack_header,
    row_digest,
    stride_of,
)

HEADER = PackHeader(
    codec="w2",
    codec_version='1 "a\\b" é',
    layers=2,
    experts=3,
    hidden=96,
    intermediate=32,
    row_bytes=5000,
    stride=8192,
    tp_rank=1,
    tp_size=2,
    identity="0123456789abcdef" * 4,
    layer_ids=(1, 5),
)


def write(path: Path, head: bytes, length: int) -> int:
    """An open file that starts with `head` and is `length` bytes long."""
    path.write_bytes(head)
    os.truncate(path, length)
    return os.open(path, os.O_RDONLY)


def read(path: Path, head: bytes, length: int) -> tuple[PackHeader, int]:
    fd = write(path, head, length)
    try:
        return read_pack_header(path, fd)
    finally:
        os.close(fd)


def test_round_trip(tmp_path: Path) -> None:
    head = header_bytes(HEADER)
    assert len(head) % ALIGNMENT == 0
    assert head == header_bytes(HEADER)
    assert read(tmp_path / "pack", head, file_bytes(HEADER)) == (HEADER, len(head))


def test_file_name() -> None:
    assert pack_filename(HEADER) == "w2.v1.0123456789abcdef0123.tp1of2.safetensors"


def test_a_long_header_takes_more_pages() -> None:
    long = dataclasses.replace(HEADER, layers=4000, layer_ids=tuple(range(4000)))
    assert len(header_bytes(long)) % ALIGNMENT == 0
    assert len(header_bytes(long)) > ALIGNMENT


@pytest.mark.parametrize(("row_bytes", "stride"), [(1, 4096), (4096, 4096), (4097, 8192), (7077888, 7077888)])
def test_stride(row_bytes: int, stride: int) -> None:
    assert stride_of(row_bytes) == stride


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layer_ids=st.sets(st.integers(0, 999), min_size=1, max_size=30),
    experts=st.integers(1, 300),
    row_bytes=st.integers(1, 20_000_000),
    ranks=st.tuples(st.integers(0, 7), st.integers(8, 64)),
    codec=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]*", fullmatch=True),
    version=st.text(max_size=20),
)
def test_any_header_comes_back_whole(
    tmp_path: Path,
    layer_ids: set[int],
    experts: int,
    row_bytes: int,
    ranks: tuple[int, int],
    codec: str,
    version: str,
) -> None:
    header = PackHeader(
        codec=codec,
        codec_version=version,
        layers=len(layer_ids),
        experts=experts,
        hidden=96,
        intermediate=32,
        row_bytes=row_bytes,
        stride=stride_of(row_bytes),
        tp_rank=ranks[0],
        tp_size=ranks[1],
        identity="0123456789abcdef" * 4,
        layer_ids=tuple(sorted(layer_ids)),
    )
    head = header_bytes(header)
    assert read(tmp_path / "pack", head, file_bytes(header)) == (header, len(head))
    last = header.row_offset(header.layers - 1, experts - 1)
    assert len(head) % ALIGNMENT == last % ALIGNMENT == 0
    assert len(head) + last + header.stride + 8 * header.rows == file_bytes(header)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"experts": -1},
        {"row_bytes": 0},
        {"stride": 8191},
        {"stride": 12288},
        {"tp_rank": 2},
        {"tp_rank": -1},
        {"tp_size": 0},
        {"layer_ids": (1,)},
        {"layer_ids": (5, 1)},
        {"layer_ids": (1, 1)},
        {"codec": "../w2"},
        {"codec": ""},
        {"identity": "a/b"},
    ],
)
def test_values_that_make_no_pack(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
        dataclasses.replace(HEADER, **change)  # type: ignore[arg-type]  # wrong values on purpose


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(header_bytes(HEADER)) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_header_is_noticed(tmp_path: Path, at: int, bit: int) -> None:
    head = bytearray(header_bytes(HEADER))
    head[at] ^= 1 << bit
    with pytest.raises(PackError):
        read(tmp_path / "pack", bytes(head), file_bytes(HEADER))


def test_metadata_that_contradicts_the_tensors(tmp_path: Path) -> None:
    # Both are well-formed, and the metadata is another header's whole metadata.
    other = dataclasses.replace(HEADER, experts=4)
    head, length = header_bytes(HEADER), file_bytes(HEADER)
    start, end = head.index(b'{"format"'), head.index(b',"rows"')
    theirs = header_bytes(other)
    forged = head[:start] + theirs[theirs.index(b'{"format"') : theirs.index(b',"rows"')] + head[end:]
    assert len(forged) == len(head)
    with pytest.raises(PackCorruptError, match="header is damaged"):
        read(tmp_path / "pack", forged, length)


def test_another_format_version(tmp_path: Path) -> None:
    head = header_bytes(HEADER).replace(b'"format_version":"1"', b'"format_version":"2"')
    with pytest.raises(PackMismatchError, match="format_version is 2, but 1 is needed") as caught:
        read(tmp_path / "pack", head, file_bytes(HEADER))
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("format_version", 1, "2")


def test_some_other_safetensors_file(tmp_path: Path, small_model: Path) -> None:
    path = small_model / "model.safetensors"
    with pytest.raises(PackCorruptError, match="no pack"):
        read(tmp_path / "pack", path.read_bytes(), path.stat().st_size)


@pytest.mark.parametrize("lost", [1, 48, 8192, 10**6])
def test_truncated(tmp_path: Path, lost: int) -> None:
    with pytest.raises(PackTruncatedError, match="ziggurat pack"):
        read(tmp_path / "pack", header_bytes(HEADER), max(file_bytes(HEADER) - lost, 0))


def test_extended(tmp_path: Path) -> None:
    with pytest.raises(PackCorruptError, match="1 more than its header says"):
        read(tmp_path / "pack", header_bytes(HEADER), file_bytes(HEADER) + 1)


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("identity", "f" * 64, "another checkpoint"),
        ("codec", "fp4", "ziggurat pack"),
        ("codec_version", "2", "ziggurat pack"),
        ("tp_rank", 0, "--tp"),
        ("tp_size", 4, "--tp"),
        ("experts", 4, "ziggurat pack"),
        ("hidden", 128, "ziggurat pack"),
        ("intermediate", 64, "ziggurat pack"),
        ("row_bytes", 5001, "ziggurat pack"),
        ("layer_ids", (2, 5), "ziggurat pack"),
    ],
)
def test_mismatch_names_field_and_both_values(field: str, value: object, advice: str) -> None:
    found = dataclasses.replace(HEADER, **{field: value})  # type: ignore[arg-type]  # by name
    check_expected(Path("p"), HEADER, HEADER)
    with pytest.raises(PackMismatchError) as caught:
        check_expected(Path("p"), HEADER, found)
    assert caught.value.field == field
    message = str(caught.value)
    for part in (f"p: {field} is ", str(value).strip("()"), str(getattr(HEADER, field)).strip("()"), advice):
        assert part in message


def test_a_digest_is_never_the_mark_of_absence() -> None:
    assert row_digest(memoryview(b"row")) != 0
