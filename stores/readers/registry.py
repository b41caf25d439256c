"""Readers by name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import DirectMode, Reader
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.ring import problem
from ziggurat.stores.readers.uring import UringReader

_log = logging.getLogger(__name__)


class _Make(Protocol):
    def __call__(self, path: Path, *, threads: int, direct: DirectMode, timeout: float | None) -> Reader: ...


def _uring_or_pread(path: Path, *, threads: int, direct: DirectMode, timeout: float | None) -> Reader:
    reason = problem()
    if reason is None:
        return UringReader(path, threads=threads, direct=direct, timeout=timeout)
    _log.warning("%s: rows are read by a pool of %d threads instead (pread)", reason, threads)
    return PreadReader(path, threads=threads, direct=direct, timeout=timeout)


def _best(path: Path, *, threads: int, direct: DirectMode, timeout: float | None) -> Reader:
    if problem() is None:
        reader = UringReader(path, threads=threads, direct=direct, timeout=timeout)
        if reader.direct:
            return reader
        # Through the page cache the pool is faster with large rows (bench/results/stores.json).
        reader.close()
    return PreadReader(path, threads=threads, direct=direct, timeout=timeout)


_READERS: dict[str, _Make] = {"auto": _best, "io_uring": _uring_or_pread, "pread": PreadReader}


def reader_names() -> tuple[str, ...]:
    """Names that `open_reader` knows."""
    return tuple(sorted(_READERS))


def open_reader(
    name: str,
    path: Path,
    *,
    threads: int = 8,
    direct: DirectMode = "auto",
    timeout: float | None = None,
    faults: Mapping[str, Any] | Path | None = None,
) -> Reader:
    """Open a file with the reader of that name; `faults` wraps it in a FaultyReader with those rules.

    timeout: seconds after which a read is given up whose buffer somebody takes over; None = never.

    "auto" is io_uring where it can be used on a file that allows direct I/O, and pread otherwise; "io_uring" says so
    in the log if it cannot.

    Raises ReaderError for an unknown name (naming the nearest), bad options or a file that cannot be opened.
    """
    make = _READERS.get(name)
    if make is None:
        near = difflib.get_close_matches(name, _READERS, 1, 0.0)
        raise ReaderError(f"unknown reader {name!r}; did you mean {near[0]!r}? ({', '.join(reader_names())})")
    reader = make(path, threads=threads, direct=direct, timeout=timeout)
    if faults is None:
        return reader
    try:
        return FaultyReader(reader, faults)
    except ReaderError:
        reader.close()
        raise
