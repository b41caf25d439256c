"""Building packs that do not come to their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.verbatim import VerbatimEncoder
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint


class Stop(Exception):  # noqa: N818  # stands for any error of an encoder
    """What a failing encoder raises."""


def after(count: int, error: type[BaseException] = Stop) -> Callable[[str], None]:
    """A hook that lets `count` experts be encoded and then fails."""
    names: list[str] = []

    def hook(name: str) -> None:
        names.append(name)
        if len(names) > count:
            raise error(name)

    return hook


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def interrupted(checkpoint: Checkpoint, folder: Path, count: int, tp_size: int = 1) -> Path:
    """Leave an unfinished build in which `count` experts were encoded; returns its (first) file."""
    encoder = VerbatimEncoder(checkpoint, before=after(count, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_pack(checkpoint, encoder, folder, tp_size, lanes=1)
    return next(folder.glob("*.building"))
