"""Checkpoints of several files: the index, and files that do not fit it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support.checkpoints import SizeArgs, write_checkpoint
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.shards import INDEX_FILE, SINGLE_FILE

SIZES: SizeArgs = {"layers": 3, "experts": 3, "top_k": 2, "hidden": 96, "intermediate": 64, "vocab": 32}
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, shards=3, **SIZES)
    return tmp_path


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def names_of(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def test_tensor_in_two_shards(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    name = next(n for n in names_of(files[0]) if ".experts." in n)
    tensor = load_file(files[0])[name]
    save_file({**load_file(files[1]), name: tensor}, files[1])
    with pytest.raises(CheckpointError, match=f"doubled: {name} .in {files[0].name} and {files[1].name}"):
        Checkpoint.open(sharded)


def test_index_naming_another_shard(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    name = next(n for n in names_of(files[0]) if ".experts." in n)
    edit_index(sharded, lambda weight_map: weight_map.__setitem__(name, files[2].name))
    with pytest.raises(CheckpointError, match=f"in another file than {INDEX_FILE} says: {name}"):
        Checkpoint.open(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lists model-00002-of-00003\.safetensors, not there"):
        Checkpoint.open(sharded)


def test_shards_without_index(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(sharded)


def test_truncated_shard(sharded: Path) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003.*1 fewer than its header says"):
        Checkpoint.open(sharded)


def test_both_single_file_and_another_index(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="holds both"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", "..", 3])
def test_index_pointing_elsewhere(sharded: Path, name: str) -> None:
    edit_index(sharded, lambda weight_map: weight_map.__setitem__(UP, name))
    with pytest.raises(CheckpointError, match="not a file name"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_FILE.replace(".", r"\.")):
        Checkpoint.open(sharded)
