"""Reading experts of a checkpoint into memory of one's own, past the page cache unless they lie there already."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.checkpoint import Checkpoint, FileRange
from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.stored import StoredExpert

ALIGNMENT = 4096
#: Reading on over a gap is cheaper than another read.
_MAX_GAP = 128 << 10


class ExpertLoader:
    """Reads a checkpoint's experts. Safe from several threads; close it when the last expert is done with."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = [_Readable(str(path)) for path in checkpoint.shards]

    def load(self, layer: int, experts: Sequence[int], memory: Memory) -> list[StoredExpert]:
        """The experts, their tensors over `memory`, which the next `load` into it overwrites.

        Raises CheckpointError if a file cannot be read or has become shorter.
        """
        ranges = (found for expert in experts for found in self._checkpoint.ranges(layer, expert))
        extents = _extents(ranges)
        view = memory.at_least(sum(extent.end - extent.begin for extent in extents))
        starts = []
        at = 0
        for extent in extents:
            starts.append(at)
            nbytes = extent.end - extent.begin
            self._files[extent.file].read(view[at : at + nbytes], extent.begin)
            at += nbytes

        def place(wanted: FileRange) -> memoryview:
            number = bisect_right(extents, wanted, key=lambda e: FileRange(e.file, e.begin, wanted.end)) - 1
            begin = starts[number] + wanted.begin - extents[number].begin
            return view[begin : begin + wanted.end - wanted.begin]

        read = self._checkpoint.read_tensor
        return [
            self._checkpoint.expert(layer, expert, tensors=lambda part, index: read(part, index, place))
            for expert in experts
        ]

    def close(self) -> None:
        for file in self._files:
            file.close()


class Memory:
    """Memory for what a `load` reads; grows to the largest."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray())

    def at_least(self, nbytes: int) -> memoryview:
        if len(self._view) < nbytes:
            self._view = memoryview(bytearray())  # before the new one is made
            self._view = aligned_buffer(nbytes)
        return self._view


def extents_bytes(checkpoint: Checkpoint, layer: int, experts: Sequence[int]) -> int:
    """Memory that loading these experts takes."""
    ranges = (found for expert in experts for found in checkpoint.ranges(layer, expert))
    return sum(extent.end - extent.begin for extent in _extents(ranges))


def _extents(ranges: Iterable[FileRange]) -> list[FileRange]:
    """What to read for them: aligned, sorted, with near neighbours joined."""
    out: list[FileRange] = []
    for file, begin, end in sorted(ranges):
        low, high = begin // ALIGNMENT * ALIGNMENT, -(-end // ALIGNMENT) * ALIGNMENT
        if out and out[-1].file == file and low <= out[-1].end + _MAX_GAP:
            out[-1] = FileRange(file, out[-1].begin, max(high, out[-1].end))
        else:
            out.append(FileRange(file, low, high))
    return out


class _Readable:
    """One file. What lies in the page cache is read from there; the rest past it, where the filesystem allows."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        try:
            self._direct: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            self._direct = None

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view`, but for what lies beyond the end of the file."""
        wanted = min(len(view), self._size - offset)
        direct = self._direct is not None and not self._is_cached(offset, wanted)
        done = 0
        while done < wanted:
            try:
                if direct:
                    assert self._direct is not None
                    count = os.preadv(self._direct, [view[done:]], offset + done)
                else:
                    count = os.preadv(self._fd, [view[done:wanted]], offset + done)
            except OSError as e:
                if direct:  # this place, or this file after all, wants none
                    direct = False
                    continue
                raise CheckpointError(f"{self._path}: cannot be read: {e.strerror}") from e
            if not count:
                raise CheckpointError(f"{self._path}: became shorter while it was being read")
            done += count
            direct = direct and done % ALIGNMENT == 0

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache holds the first and the last of these bytes, most probably all of them then."""
        probe = bytearray(1)
        try:
            for at in (offset, offset + nbytes - 1):
                os.preadv(self._fd, [probe], at, os.RWF_NOWAIT)
        except OSError:  # not there, or the filesystem cannot tell
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)
