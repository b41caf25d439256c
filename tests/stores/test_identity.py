"""Identity is content: what must change it and what must not."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.checkpoints import SizeArgs, write_checkpoint
from ziggurat.stores import identity
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.headers import read_header
from ziggurat.stores.identity import PAGE, SAMPLED_PAGES, WHOLE_BELOW, checkpoint_identity, sample_offsets
from ziggurat.stores.shards import INDEX_FILE, SINGLE_FILE

SIZES: SizeArgs = {"layers": 2, "experts": 2, "top_k": 1, "hidden": 64, "intermediate": 32, "vocab": 32}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", shards=2, **SIZES)
    return tmp_path / "model"


def test_is_the_opened_checkpoints(model: Path) -> None:
    found = checkpoint_identity(model)
    with Checkpoint.open(model) as checkpoint:
        assert checkpoint.identity == found
    assert len(found) == 64
    assert set(found) <= set("0123456789abcdef")


def test_path_times_and_other_files_do_not_matter(model: Path, tmp_path: Path) -> None:
    before = checkpoint_identity(model)
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere" / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    (copy / "README.md").write_text("more")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    assert checkpoint_identity(copy) == before


def test_names_and_order_of_shards_do_not_matter(model: Path) -> None:
    before = checkpoint_identity(model)
    index = json.loads((model / INDEX_FILE).read_text())
    swapped = {
        "model-00001-of-00002.safetensors": "z.safetensors",
        "model-00002-of-00002.safetensors": "a.safetensors",
    }
    for old, new in swapped.items():
        (model / old).rename(model / new)
    index["weight_map"] = {name: swapped[file] for name, file in index["weight_map"].items()}
    (model / INDEX_FILE).write_text(json.dumps(index))
    assert checkpoint_identity(model) == before


def test_every_byte_of_a_small_file_matters(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SIZES)
    path = tmp_path / SINGLE_FILE
    raw = bytearray(path.read_bytes())
    start = read_header(path).data_start
    seen = {checkpoint_identity(tmp_path)}
    places = [start, start + 1, (start + len(raw)) // 2, len(raw) - 1]
    for at in places:
        raw[at] ^= 1
        path.write_bytes(raw)
        seen.add(checkpoint_identity(tmp_path))
        raw[at] ^= 1
    assert len(seen) == 1 + len(places)


def test_the_header_matters_byte_for_byte(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SIZES)
    path = tmp_path / SINGLE_FILE
    before = checkpoint_identity(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"format":"pt"', b'"format":"np"', 1))
    assert checkpoint_identity(tmp_path) != before


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_checkpoint(tmp_path / str(seed), seed=seed, **SIZES)
    assert checkpoint_identity(tmp_path / "0") != checkpoint_identity(tmp_path / "1")


def test_the_stated_block_shape_matters(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format="fp8_block", block=(128, 128), **SIZES)
    before = checkpoint_identity(tmp_path)
    written.config["quantization_config"]["weight_block_size"] = [128, 64]
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    assert checkpoint_identity(tmp_path) != before


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BELOW", 0)
    monkeypatch.setattr(identity, "SAMPLED_PAGES", 3)
    write_checkpoint(tmp_path, **SIZES)
    path = tmp_path / SINGLE_FILE
    header = read_header(path)
    raw = bytearray(path.read_bytes())
    before = checkpoint_identity(tmp_path)
    last = header.data_bytes - PAGE
    sampled = {at + i for at in (0, last // 2, last) for i in (0, PAGE - 1)}
    for at in (0, PAGE - 1, PAGE, last // 2, last // 2 + PAGE, last, header.data_bytes - 1):
        raw[header.data_start + at] ^= 1
        path.write_bytes(raw)
        assert (checkpoint_identity(tmp_path) != before) == (at in sampled)
        raw[header.data_start + at] ^= 1


@given(st.integers(0, 1 << 45))
def test_sample_is_bounded_and_holds_both_ends(data_bytes: int) -> None:
    pieces = sample_offsets(data_bytes)
    assert sum(length for _, length in pieces) <= max(WHOLE_BELOW, SAMPLED_PAGES * PAGE)
    assert all(length > 0 for _, length in pieces)
    assert pieces == sorted(pieces)
    if data_bytes:
        assert pieces[0][0] == 0
        assert sum(pieces[-1]) == data_bytes


def test_sample_of_a_large_file_spreads_evenly() -> None:
    pieces = sample_offsets(5 << 30)
    assert len(pieces) == SAMPLED_PAGES
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(pieces)]
    assert max(gaps) - min(gaps) <= 1
