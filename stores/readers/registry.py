"""Readers by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import DirectMode, Reader
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader


class _Make(Protocol):
    def __call__(self, path: Path, *, threads: int, direct: DirectMode) -> Reader: ...


_READERS: dict[str, _Make] = {"pread": PreadReader}


def reader_names() -> tuple[str, ...]:
    """Names that `open_reader` knows."""
    return tuple(sorted(_READERS))


def open_reader(
    name: str,
    path: Path,
    *,
    threads: int = 8,
    direct: DirectMode = "auto",
    faults: Mapping[str, Any] | Path | None = None,
) -> Reader:
    """Open a file with the reader of that name; `faults` wraps it in a FaultyReader with those rules.

    Raises ReaderError for an unknown name (naming the nearest), bad options or a file that cannot be opened.
    """
    make = _READERS.get(name)
    if make is None:
        near = difflib.get_close_matches(name, _READERS, 1, 0.0)
        raise ReaderError(f"unknown reader {name!r}; did you mean {near[0]!r}? ({', '.join(reader_names())})")
    reader = make(path, threads=threads, direct=direct)
    if faults is None:
        return reader
    try:
        return FaultyReader(reader, faults)
    except ReaderError:
        reader.close()
        raise
