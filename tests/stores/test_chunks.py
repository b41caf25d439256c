"""Chunks: any size gives the same packs, every expert is read once for all ranks, and only absent rows are written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.building import interrupted, snapshot
from support.verbatim import VerbatimEncoder
from ziggurat.stores import chunks
from ziggurat.stores.builder import build_pack, expected_header
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.loading import ExpertLoader, Memory
from ziggurat.stores.packformat import header_bytes
from ziggurat.stores.stored import StoredExpert


@pytest.mark.parametrize("nbytes", [1, 2 * 24576, 1 << 30])
def test_the_same_packs_whatever_the_size(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    build_pack(small, VerbatimEncoder(small), tmp_path / "usual", 2)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", nbytes)
    build_pack(small, VerbatimEncoder(small), tmp_path / "other", 2, lanes=3)
    assert snapshot(tmp_path / "other") == snapshot(tmp_path / "usual")


def test_every_expert_is_read_once_for_all_ranks(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[tuple[int, int]] = Counter()
    load = ExpertLoader.load

    def counting(
        self: ExpertLoader, layer: int, experts: Sequence[int], memory: Memory
    ) -> list[StoredExpert]:
        read.update((layer, expert) for expert in experts)
        return load(self, layer, experts, memory)

    monkeypatch.setattr(ExpertLoader, "load", counting)
    assert len(build_pack(small, VerbatimEncoder(small), tmp_path, 4)) == 4
    assert read == Counter((layer, expert) for layer in range(2) for expert in range(3))


@pytest.mark.parametrize("bad", [(0, 2), (1,), (0, 1, 2)])
def test_rows_that_are_absent_here_and_there(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]
) -> None:
    (whole,) = build_pack(small, VerbatimEncoder(small), tmp_path / "whole")
    expected = whole.read_bytes()
    building = interrupted(small, tmp_path / "cut", 4)  # the first layer is done, and one row of the second
    header = expected_header(small, VerbatimEncoder(small))
    start = len(header_bytes(header))
    with building.open("r+b") as file:
        for expert in bad:
            file.seek(start + header.row_offset(0, expert))
            file.write(b"damaged")
    written: list[int] = []
    pwrite = os.pwrite

    def recording(fd: int, data: bytes, offset: int) -> int:
        done = pwrite(fd, data, offset)
        written.extend(range((offset - start) // header.stride, (offset - start + done) // header.stride))
        return done

    monkeypatch.setattr(os, "pwrite", recording)
    (cut,) = build_pack(small, VerbatimEncoder(small), tmp_path / "cut")
    assert cut.read_bytes() == expected
    assert sorted(row for row in written if row < 3) == list(bad)
