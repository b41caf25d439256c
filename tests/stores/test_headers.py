"""Safetensors headers: what the format allows, and everything a damaged or hostile file may hold."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from ziggurat.stores.errors import HeaderError
from ziggurat.stores.headers import DTYPE_BITS, read_header

SOUND = save(
    {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": torch.ones(5), "empty": torch.ones(0, 4)},
    metadata={"format": "pt"},
)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header (anything JSON can say, or bytes) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "file.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "sound.safetensors"
    path.write_bytes(SOUND)
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {t.name: (t.dtype, t.shape, t.nbytes) for t in header.tensors.values()} == {
        "a": ("I16", (2, 3), 12),
        "b": ("F32", (5,), 20),
        "empty": ("F32", (0, 4), 0),
    }
    assert header.data_start + header.data_bytes == len(SOUND)
    assert path.read_bytes()[8 : header.data_start] == header.raw


@pytest.mark.parametrize(
    ("header", "data", "kind", "says"),
    [
        ({"a": entry()}, b"123", "truncated", "1 fewer"),
        ({"a": entry()}, b"12345", "extended", "1 more"),
        ({"a": entry("U9")}, b"1234", "malformed", "unknown dtype 'U9'"),
        ({"a": entry(["U8"])}, b"1234", "malformed", "unknown dtype ['U8']"),
        ({"a": entry(shape=(5,))}, b"1234", "malformed", "'a': shape [5] of U8 does not fill its 4 bytes"),
        ({"a": entry(shape=(3,))}, b"1234", "malformed", "'a': shape [3] of U8 does not fill its 4 bytes"),
        ({"a": entry(shape=(2**62, 2**62))}, b"1234", "malformed", "does not fill"),
        ({"a": entry(shape=(2**62,) * 500 + (0,))}, b"1234", "malformed", "does not fill"),
        ({"a": entry(shape=(-4,))}, b"1234", "malformed", "not a list of sizes"),
        ({"a": entry(shape=(4.0,))}, b"1234", "malformed", "not a list of sizes"),
        ({"a": entry(shape=(True, 4))}, b"1234", "malformed", "not a list of sizes"),
        ({"a": entry(shape=4)}, b"1234", "malformed", "not a list of sizes"),
        ({"a": entry(offsets=(4, 0))}, b"1234", "malformed", "run backwards"),
        ({"a": entry(offsets=(0, 4, 8))}, b"1234", "malformed", "not two byte offsets"),
        ({"a": entry(offsets=(0, 2**64))}, b"1234", "malformed", "not two byte offsets"),
        ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", "malformed", "'b' overlaps 'a'"),
        ({"a": entry(), "b": entry(offsets=(6, 10))}, b"1" * 10, "malformed", "2 bytes before tensor 'b'"),
        ({"a": entry(extra=1)}, b"1234", "malformed", "exactly dtype, shape and data_offsets"),
        ({"a": [1]}, b"", "malformed", "exactly dtype, shape and data_offsets"),
        ({"__metadata__": {"k": 1}}, b"", "malformed", "'k' is not a string"),
        ({"__metadata__": []}, b"", "malformed", "__metadata__ is not"),
        ({"\ud800": entry()}, b"1234", "malformed", "not valid Unicode"),
        ({"__metadata__": {"k": "\ud800"}}, b"", "malformed", "'k' is not valid Unicode"),
        ({"__metadata__": {"\udfff": ""}}, b"", "malformed", "is not valid Unicode"),
        (b'{"a":1,"a":2}', b"", "malformed", "'a' stands twice"),
        (b"[]", b"", "malformed", "starts with '['"),
        (b"", b"", "malformed", "starts with ''"),
        (b"{", b"", "malformed", "not JSON"),
        (b'{"\xff": 1}', b"", "malformed", "not UTF-8"),
        (b'{"a":' * 20000, b"", "malformed", "20000 objects and lists in a header of 100000 bytes"),
        (b'{"aaaaaaaa":' * 20000, b"", "malformed", "not JSON"),
        (b'{"a":' + b"9" * 6000 + b"}", b"", "malformed", "not JSON"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: Any, data: bytes, kind: str, says: str) -> None:
    path = write(tmp_path, header, data)
    with pytest.raises(HeaderError) as caught:
        read_header(path)
    assert caught.value.kind == kind
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("length", "kind"), [(2**64 - 1, "malformed"), (100_000_001, "malformed"), (99_999_999, "truncated")]
)
def test_absurd_header_length_allocates_nothing(tmp_path: Path, length: int, kind: str) -> None:
    path = write(tmp_path, {"a": entry()}, b"1234", length=length)
    tracemalloc.start()
    try:
        with pytest.raises(HeaderError, match=str(length)) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.kind == kind


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"\0" * size)
    with pytest.raises(HeaderError, match=f"{size} bytes long"):
        read_header(path)


def parse_or_refuse(path: Path) -> None:
    """Either a HeaderError, or a file that the safetensors library opens as well and sees the same in."""
    try:
        header = read_header(path)
    except HeaderError:
        return
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(header.tensors)
        for name, tensor in header.tensors.items():
            piece = file.get_slice(name)
            assert (piece.get_dtype(), tuple(piece.get_shape())) == (tensor.dtype, tensor.shape)


@QUICK
@given(
    edits=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    keep=st.integers(0, len(SOUND) + 8),
)
def test_changed_bytes_never_crash(tmp_path: Path, edits: list[tuple[int, int]], keep: int) -> None:
    raw = bytearray(SOUND)
    for at, value in edits:
        raw[at] = value
    path = tmp_path / "fuzzed"
    path.write_bytes((bytes(raw) + b"\0" * 8)[:keep])
    parse_or_refuse(path)


sizes = st.one_of(
    st.integers(0, 6), st.integers(-2, 2**70), st.floats(allow_nan=False), st.booleans(), st.none(), st.text()
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from([*DTYPE_BITS, "U4"]), st.integers()),
        "shape": st.one_of(st.lists(st.integers(0, 6), max_size=3), st.lists(sizes, max_size=3), sizes),
        "data_offsets": st.one_of(
            st.lists(st.integers(0, 24), min_size=2, max_size=2), st.lists(sizes, max_size=3), sizes
        ),
    },
    optional={"more": st.integers()},
)


@QUICK
@given(
    header=st.dictionaries(st.one_of(st.text(max_size=3), st.just("__metadata__")), entries, max_size=3),
    data=st.binary(max_size=24),
    padding=st.integers(0, 8),
)
def test_generated_headers_never_crash(
    tmp_path: Path, header: dict[str, Any], data: bytes, padding: int
) -> None:
    raw = json.dumps(header).encode() + b" " * padding
    parse_or_refuse(write(tmp_path, raw, data))
