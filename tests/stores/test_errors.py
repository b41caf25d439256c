"""Errors travel between processes: ranks report them to each other."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ziggurat.stores.errors import (
    CheckpointError,
    DiskFullError,
    HeaderError,
    PackCorruptError,
    PackLockedError,
    PackMismatchError,
    PackWriteError,
    RowReadError,
    StoreError,
)

P = Path("packs/p")


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("folder: 1 expert tensor missing: a", ["a"]),
        HeaderError(P, "truncated", "too short"),
        PackCorruptError(P, "damaged"),
        PackMismatchError(P, "codec", "w2", "fp4", "do this"),
        PackLockedError(P, 17),
        PackLockedError(P, None),
        PackWriteError(P, "read-only"),
        DiskFullError(P, 100, 30),
        RowReadError(3, 17, P, "no such luck", "io"),
    ],
)
def test_pickling_keeps_type_message_and_fields(error: StoreError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert len(str(error).splitlines()) == 1


def test_messages() -> None:
    assert str(RowReadError(3, 17, P, "EIO")) == "layer 3 expert 17 of packs/p: EIO"
    assert str(PackMismatchError(P, "codec", "w2", "fp4", "do this")) == (
        "packs/p: codec is fp4, but w2 is needed; do this"
    )
    full = DiskFullError(P, 100, 30)
    assert full.short == 70
    assert "100 bytes needed, 30 available, 70 bytes short" in str(full)
    assert DiskFullError(P, 100, 500).short == 1  # the disk was full a moment ago
