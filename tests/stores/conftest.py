"""Small checkpoints and packs for the tests of stores."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import SizeArgs, write_checkpoint
from support.disks import tmpfs
from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack, expected_header
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.packformat import PackHeader

SMALL: SizeArgs = {"layers": 2, "experts": 3, "top_k": 2, "hidden": 96, "intermediate": 32, "vocab": 64}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint of 2 layers with 3 experts; not to be changed."""
    folder = tmp_path_factory.mktemp("small-model")
    write_checkpoint(folder, **SMALL)
    return folder


@pytest.fixture
def small(small_model: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(small_model) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="session")
def small_pack_file(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete pack of the small model; not to be changed."""
    with Checkpoint.open(small_model) as checkpoint:
        (path,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), tmp_path_factory.mktemp("small-pack"))
    return path


@pytest.fixture
def pack_copy(small_pack_file: Path, tmp_path: Path) -> Path:
    """A copy of the small pack, to be damaged."""
    return Path(shutil.copy(small_pack_file, tmp_path))


@pytest.fixture
def wanted(small: Checkpoint) -> PackHeader:
    return expected_header(small, VerbatimEncoder(small))


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 1 MiB. Needs the right to mount."""
    with tmpfs(tmp_path / "tmpfs", "1m") as place:
        if place is None:
            pytest.skip("needs the right to mount a tmpfs")
        yield place
