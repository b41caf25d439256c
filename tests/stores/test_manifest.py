"""The manifest of a folder without experts: what it says, and that nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.stores.errors import ManifestError
from ziggurat.stores.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    ExpertFacts,
    FileFacts,
    Manifest,
    _digest,
    manifest_bytes,
    parse_manifest,
    read_manifest,
)

PATH = Path("model") / MANIFEST_FILE
MANIFEST = Manifest(
    "ab" * 32,
    (128, 128),
    ExpertFacts((1, 2), 4, 96, 64, "fp8_block", (128, 128), "bfloat16", 48, 1 << 40),
    {"config.json": FileFacts(7, "0" * 64), "model.safetensors": FileFacts(1 << 33, "1" * 64, "2" * 64)},
)
RAW = manifest_bytes(MANIFEST)


def resealed(change: dict[str, Any] | None = None, **entries: Any) -> bytes:
    """The manifest with other entries (`change`: of its experts) and a digest that is right for them."""
    body = json.loads(RAW)
    body.pop("digest")
    body.update(entries)
    body["experts"].update(change or {})
    return json.dumps({**body, "digest": _digest(body)}).encode()


def manifest_or_problem(raw: bytes) -> Manifest | str:
    """What is read, or why it is refused; no other error comes of any bytes."""
    try:
        return parse_manifest(PATH, raw)
    except ManifestError as e:
        return str(e)


def test_it_says_what_was_written(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST_FILE).write_bytes(RAW)
    assert read_manifest(tmp_path) == MANIFEST
    assert MANIFEST.shards == {"model.safetensors": MANIFEST.files["model.safetensors"]}
    assert parse_manifest(PATH, resealed()) == MANIFEST


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(ManifestError, match="cannot be read: Is a directory"):
        read_manifest(tmp_path)


def test_every_truncation_is_named() -> None:
    for length in range(len(RAW) - 1):  # the last byte ends the line
        with pytest.raises(ManifestError, match=MANIFEST_FILE):
            parse_manifest(PATH, RAW[:length])


@given(at=st.integers(0, len(RAW) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_changes_nothing_or_is_an_error(at: int, bit: int) -> None:
    raw = bytearray(RAW)
    raw[at] ^= 1 << bit
    found = manifest_or_problem(bytes(raw))
    if isinstance(found, str):
        assert str(PATH) in found
    else:
        assert found == MANIFEST  # white space


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_bytes(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(PATH, raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["identity", "stated_block", "experts", "files", "format", "format_version"]), JSON)
def test_any_value_with_a_right_digest(name: str, value: Any) -> None:
    """Whoever can compute a digest is refused all the same, or says something a manifest can say."""
    body = json.loads(RAW)
    body.pop("digest")
    body[name] = value
    found = manifest_or_problem(json.dumps({**body, "digest": _digest(body)}).encode())
    if isinstance(found, str):
        assert str(PATH) in found
    else:
        assert (name, value) in [("stated_block", None), ("files", {}), ("format_version", 1)]
        assert found.experts == MANIFEST.experts


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[]", "starts with"),
        (b"\xff{}", "not UTF-8"),
        (b'{"format": "other"}', "format is 'other'"),
        (b'{"format": "a", "format": "b"}', "stands twice"),
        (b'{"a":' * 20000, "20000 objects and lists"),
        (b'{"a":' + b"[" * 100000, "objects and lists"),
        (b'{"a":' + b"1" * 100000 + b"}", "not JSON"),
        (RAW.replace(b'"experts": 4', b'"experts": 5'), "damaged: its digest is"),
        (resealed(format_version=2), "format_version is 2"),
        (resealed(format_version=True), "format_version is True"),
        (resealed(identity="ab" * 31), "identity is"),
        (resealed(identity="AB" * 32), "identity is"),
        (resealed(more=1), "does not hold exactly"),
        (resealed(files=[]), "files is not an object"),
        (resealed(files={"../x": {}}), "is not a file name"),
        (resealed(files={"\ud800": {}}), "is not a file name"),
        (resealed(files={"a": {"nbytes": 1}}), "does not hold exactly"),
        (resealed(files={"a": {"nbytes": -1, "sha256": "0" * 64, "sample": ""}}), "nbytes is -1"),
        (resealed(files={"a": {"nbytes": 1, "sha256": "x", "sample": ""}}), "sha256 is 'x'"),
        (resealed(files={"a": {"nbytes": 1, "sha256": "0" * 64, "sample": "0"}}), "sample is '0'"),
        (resealed(stated_block=[1]), "stated_block is"),
        (resealed({"format": "int3"}), "experts.format is 'int3'"),
        (resealed({"dtype": "nn"}), "experts.dtype is 'nn'"),
        (resealed({"dtype": ["bfloat16"]}), "experts.dtype is"),
        (resealed({"format": []}), "experts.format is"),
        (resealed({"layer_ids": [0, "1"]}), "experts.layer_ids is"),
        (resealed({"hidden": 1e9}), "experts.hidden is"),
        (resealed({"block": [128, 0]}), "experts.block is"),
    ],
)
def test_what_no_manifest_says(raw: bytes, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(PATH, raw)
    assert said in str(caught.value)
    assert "run `ziggurat export` again" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_FILE).open("wb") as file:
        file.truncate(1 << 40)  # without blocks
    with pytest.raises(ManifestError, match=f"over the limit of {MAX_MANIFEST_BYTES}"):
        read_manifest(tmp_path)
