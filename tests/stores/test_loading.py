"""Experts read into memory are those of the mapped files, in every layout and format, cached or not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import Format, Layout, SizeArgs, write_checkpoint
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.loading import ExpertLoader, Memory, extents_bytes
from ziggurat.stores.stored import StoredExpert

SIZES: SizeArgs = {"layers": 2, "experts": 5, "top_k": 2, "hidden": 96, "intermediate": 32, "vocab": 64}
CASES: tuple[tuple[Format, Layout], ...] = (
    ("bf16", "per-expert"),
    ("bf16", "fused"),
    ("bf16", "fused-transposed"),
    ("f32", "per-expert"),
    ("fp8_block", "per-expert"),
    ("nvfp4", "per-expert"),
    ("mxfp4", "per-expert"),
)


def assert_same(found: StoredExpert, expected: StoredExpert) -> None:
    for matrix in ("w1", "w3", "w2"):
        mine, theirs = getattr(found, matrix), getattr(expected, matrix)
        for field in fields(mine):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            if isinstance(b, torch.Tensor):
                assert a.dtype == b.dtype
                assert a.shape == b.shape
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            else:
                assert a == b


@pytest.fixture(params=CASES, ids="-".join)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    form, layout = request.param
    write_checkpoint(tmp_path, format=form, layout=layout, **SIZES)
    with Checkpoint.open(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("experts", [[0], [4], [1, 2, 3], [0, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("cached", [False, True])
def test_what_is_read_is_what_the_file_holds(
    checkpoint: Checkpoint, experts: Sequence[int], cached: bool
) -> None:
    loader, memory = ExpertLoader(checkpoint), Memory()
    for layer in (1, 0):
        for path in checkpoint.shards:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED if cached else os.POSIX_FADV_DONTNEED)
            os.close(fd)
        memory.at_least(1 << 16)[:] = b"\xff" * len(memory.at_least(1 << 16))  # stale bytes must not show
        found = loader.load(layer, experts, memory)
        assert len(memory.at_least(0)) >= extents_bytes(checkpoint, layer, experts)
        for expert, one in zip(experts, found, strict=True):
            assert_same(one, checkpoint.expert(layer, expert))
    loader.close()


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        loader = ExpertLoader(checkpoint)
        os.truncate(checkpoint.shards[0], 8192)
        with pytest.raises(CheckpointError, match="became shorter"):
            loader.load(1, range(5), Memory())
        loader.close()
