"""Writing rows into an unfinished pack, past the page cache where the filesystem allows that.

Direct writes take a tenth of the processor time of buffered ones, and leave little for the sync to do.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ziggurat.stores.packformat import PackHeader, file_bytes, header_bytes
from ziggurat.stores.writing import writing

DIRECT_ALIGNMENT = 4096


class RowFile:
    """An unfinished pack, opened for writing. Several threads and processes may write different rows at once.

    fd: the descriptor of buffered writes.
    """

    def __init__(self, path: Path, header: PackHeader, flags: int = os.O_RDWR) -> None:
        """Raises OSError."""
        self.path = path
        self.header = header
        self._start = len(header_bytes(header))
        self._length = file_bytes(header)
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            self._direct: int | None = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # the filesystem has no direct I/O
            self._direct = None

    def write_rows(self, layer: int, expert: int, rows: memoryview) -> None:
        """Write the rows of one or more experts that follow each other, `stride` bytes each.

        Raises DiskFullError, PackWriteError.
        """
        with writing(self.path, self.unwritten):
            self.write(rows, self._start + self.header.row_offset(layer, expert))

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`; past the page cache if address, offset and length are multiples of 4 KiB."""
        done = 0
        while done < len(data):
            rest, at = data[done:], offset + done
            direct = self._direct
            if direct is not None and at % DIRECT_ALIGNMENT == 0 and len(rest) % DIRECT_ALIGNMENT == 0:
                try:
                    done += os.pwrite(direct, rest, at)
                    continue
                except OSError as e:
                    if e.errno != errno.EINVAL:  # this place, or this file after all, takes no direct I/O
                        raise
            done += os.pwrite(self.fd, rest, at)

    def unwritten(self) -> int:
        """Bytes that are still to be written."""
        return max(self._length - os.fstat(self.fd).st_blocks * 512, 0)

    def close(self) -> None:
        os.close(self.fd)
        if self._direct is not None:
            os.close(self._direct)
