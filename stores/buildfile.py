"""A pack file while it is being built.

It has its full length and final header from the start; a checksum of 0 marks a row as absent. A row's checksum is
written only after the row's bytes were synced to disk. A build that continues checks every row that is there all the
same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.errors import PackError
from ziggurat.stores.pack import BUILDING_SUFFIX, read_checksums
from ziggurat.stores.packformat import (
    ABSENT,
    CHECKSUM_BYTES,
    PackHeader,
    file_bytes,
    header_bytes,
    pack_filename,
    read_pack_header,
    row_digest,
)
from ziggurat.stores.rowfile import RowFile
from ziggurat.stores.writing import sync_folder, writing


def building_path(folder: Path, header: PackHeader) -> Path:
    return folder / (pack_filename(header) + BUILDING_SUFFIX)


def is_resumable(path: Path, header: PackHeader) -> bool:
    """Whether the file at `path` is an unfinished pack with exactly this header."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return read_pack_header(path, fd)[0] == header
    except (PackError, OSError):
        return False
    finally:
        os.close(fd)


class BuildFile:
    """One rank's unfinished pack. The caller holds the build lock.

    created: this run made the file, so an error of this run removes it. rows: where its rows are written.
    """

    def __init__(self, folder: Path, header: PackHeader, *, resume: bool = True) -> None:
        """Continue the file an earlier run left if it fits, else start anew. Raises PackWriteError, DiskFullError."""
        self.header = header
        self.final = folder / pack_filename(header)
        self.path = building_path(folder, header)
        self.created = not (resume and is_resumable(self.path, header))
        self._head = header_bytes(header)
        self._length = file_bytes(header)
        with writing(self.path, self._length):
            if self.created:
                self.rows = self._create()
            else:
                self.rows = RowFile(self.path, header)
            self._fd = self.rows.fd
            self._checksums = np.array(read_checksums(self._fd, header, len(self._head)))
        if not self.created:
            self._forget_damaged()

    def missing(self, layer: int) -> list[int]:
        """Experts of a layer (by index) whose rows are absent."""
        return [int(expert) for expert in np.flatnonzero(self._checksums[layer] == ABSENT)]

    def _forget_damaged(self) -> None:
        """Take rows that an earlier run left, but whose bytes do not match, as absent.

        A kill can tear the write of a checksum, and a disk can lose what it said it had synced.
        """
        row = aligned_buffer(self.header.stride)
        for layer, expert in np.argwhere(self._checksums != ABSENT):
            offset = len(self._head) + self.header.row_offset(int(layer), int(expert))
            if not _read_all(self._fd, row, offset) or row_digest(row) != int(self._checksums[layer, expert]):
                self._checksums[layer, expert] = ABSENT

    def commit(self, layer: int, digests: Mapping[int, int]) -> None:
        """Declare rows of a layer good: syncs everything written so far, then writes their checksums."""
        for expert, digest in digests.items():
            self._checksums[layer, expert] = digest
        start = len(self._head) + self.header.rows_nbytes + layer * self.header.experts * CHECKSUM_BYTES
        table = self._checksums[layer].astype("<u8").tobytes()
        with writing(self.path, self.rows.unwritten):
            os.fdatasync(self._fd)
            self.rows.write(memoryview(table), start)

    def finish(self) -> Path:
        """Make the complete pack visible under its final name."""
        if (self._checksums == ABSENT).any():
            raise AssertionError(f"{self.path} still lacks rows")
        with writing(self.path, self.rows.unwritten):
            os.fsync(self._fd)
            self.path.rename(self.final)
            sync_folder(self.final.parent)
        return self.final

    def close(self, *, discard: bool = False) -> None:
        """Let the file go; `discard` removes it if this run created it."""
        self.rows.close()
        if discard and self.created:
            self.path.unlink(missing_ok=True)

    def _create(self) -> RowFile:
        file = RowFile(self.path, self.header, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(file.fd, self._length)
            file.write(memoryview(self._head), 0)
        except BaseException:
            file.close()
            self.path.unlink(missing_ok=True)
            raise
        return file


def _read_all(fd: int, buffer: memoryview, offset: int) -> bool:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError:
            return False  # it is written again
        if count == 0:
            return False
        done += count
    return True
