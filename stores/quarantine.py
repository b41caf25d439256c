"""Rows whose bytes were found wrong, until they are good again."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from threading import Lock
from typing import Protocol

from ziggurat.stores.errors import RebuildError
from ziggurat.stores.packformat import CHECKSUM_BYTES, PackHeader, row_digest

_log = logging.getLogger(__name__)


class Rebuild(Protocol):
    """Fills `buffer` (writable, `stride` bytes) with row (layer index, expert). Raises RebuildError if it cannot."""

    def __call__(self, layer: int, expert: int, buffer: memoryview) -> None: ...


class Quarantine:
    """Keeps the damaged rows of one pack apart, makes them anew where it can, and writes them back.

    A row in here is read from the disk, past the page cache, and checked at every read, until it was good once.
    file: (device, inode) of the pack, since by the time a row is written back its path may lead to another file.
    mismatches: reads whose bytes did not match their checksum. entered: times a row came in. rebuilt: rows served from
    the checkpoint. mended: those among them that are right on the disk again. Safe for concurrent callers.
    """

    def __init__(
        self, path: Path, header: PackHeader, data_start: int, file: tuple[int, int], rebuild: Rebuild | None
    ) -> None:
        self._path = path
        self._header = header
        self._data_start = data_start
        self._file = file
        self._rebuild = rebuild
        self._tags: set[int] = set()
        self._said: dict[int, set[str]] = {}  # what the log knows of a row that has not been good since
        self._lock = Lock()
        self.mismatches = 0
        self.entered = 0
        self.rebuilt = 0
        self.mended = 0

    @property
    def can_rebuild(self) -> bool:
        return self._rebuild is not None

    @property
    def tags(self) -> frozenset[int]:
        """Rows (layer index * experts + expert) that are in it now."""
        with self._lock:
            return frozenset(self._tags)

    def counts(self) -> tuple[int, int, int]:
        """entered, rebuilt and mended, at one moment."""
        with self._lock:
            return self.entered, self.rebuilt, self.mended

    def mismatch(self, tag: int) -> None:
        """A read of this row brought wrong bytes."""
        with self._lock:
            self.mismatches += 1
            self.entered += tag not in self._tags
            self._tags.add(tag)
        self._say(tag, "is damaged; it is read again from the disk")

    def good(self, tag: int) -> None:
        """The row was read well."""
        if self._tags or self._said:
            with self._lock:
                self._tags.discard(tag)
                self._said.pop(tag, None)

    def restore(self, tag: int, buffer: memoryview, checksum: int, found: int | None) -> int:
        """Make the row anew in `buffer` (`stride` bytes), and put the file right if it can be written; its checksum.

        checksum: the pack's. found: the digest of what the disk holds, if it could be read. The row is believed if it
        has the pack's checksum, or if it is what the disk holds: then it is the checksum that is damaged.
        Raises RebuildError if there is nothing to make it from or it is not believed.
        """
        if self._rebuild is None:
            raise RebuildError("there is no checkpoint to make it anew from")
        layer, expert = divmod(tag, self._header.experts)
        self._rebuild(layer, expert, buffer)
        digest = row_digest(buffer)
        if digest not in (checksum, found):
            raise RebuildError(
                f"made anew from the checkpoint it has the checksum {digest:016x}, which is neither"
            )
        self._say(tag, "was made anew from the checkpoint")
        if digest == checksum:
            mended = self._write(tag, buffer, self._data_start + tag * self._header.stride)
        else:
            table = self._data_start + self._header.rows_nbytes
            mended = self._write(tag, digest.to_bytes(CHECKSUM_BYTES, "little"), table + tag * CHECKSUM_BYTES)
        with self._lock:  # together, so that nobody sees a row whose end is open
            self.rebuilt += 1
            self.mended += mended
        return digest

    def _write(self, tag: int, data: memoryview | bytes, offset: int) -> bool:
        """Write a row or a checksum back; False, after a line in the log, where that is not possible."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) != self._file:
                    raise OSError(errno.ESTALE, "the file was replaced by another one")
                done = 0
                while done < len(data):
                    done += os.pwrite(fd, data[done:], offset + done)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            self._say(tag, f"cannot be written back: {e.strerror}")
            return False
        return True

    def _say(self, tag: int, what: str) -> None:
        """A line in the log, once until the row was good: a disk that fails at every read would fill the log."""
        with self._lock:
            said = self._said.setdefault(tag, set())
            if what in said:
                return
            said.add(what)
        layer, expert = divmod(tag, self._header.experts)
        _log.warning("%s: layer %d expert %d %s", self._path, self._header.layer_ids[layer], expert, what)
