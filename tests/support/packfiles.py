"""Damaging pack files, and finding places in them."""

from __future__ import annotations

import os
from pathlib import Path

from ziggurat.stores.packformat import PackHeader


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def row_start(path: Path, header: PackHeader, layer: int, expert: int) -> int:
    return data_start(path) + header.row_offset(layer, expert)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def absent_checksum(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


def unfinished(path: Path) -> None:
    path.rename(path.with_name(path.name + ".building"))


def damaged_metadata(path: Path) -> None:
    at = path.read_bytes().index(b'"hidden":"96"') + len(b'"hidden":"9')
    flip(path, at, 0)
