"""Reading rows out of a pack file."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.counts import PackCounts
from ziggurat.stores.errors import (
    PackError,
    PackIncompleteError,
    PackMissingError,
    RebuildError,
    RowFailure,
    RowReadError,
)
from ziggurat.stores.packformat import (
    ABSENT,
    CHECKSUM_BYTES,
    PackHeader,
    check_expected,
    read_pack_header,
    row_digest,
)
from ziggurat.stores.quarantine import Quarantine, Rebuild
from ziggurat.stores.readers.base import Arrived, Reader, ReadJob
from ziggurat.stores.readers.late import LateRead, ReadTimeoutError
from ziggurat.stores.readers.pread import PreadReader

VerifyMode = Literal["always", "first-read", "never"]
BUILDING_SUFFIX = ".building"
_DAMAGED = (
    "checksum {} in two reads; `ziggurat verify` lists all bad rows, and with --rebuild it makes them anew from the "
    "checkpoint (or delete the file, then `ziggurat pack`, or `ziggurat import` if that brought it)"
)


class RowRequest(NamedTuple):
    """Read row (layer, expert) into `buffer`: writable, at least `stride` bytes. `layer` is a layer index.

    sole: the buffer is where the row stays, so that the page cache need not hold it a second time.
    late: takes the buffer over if its read is given up; see `ReadJob`. Without it the read is waited for.
    """

    layer: int
    expert: int
    buffer: memoryview
    sole: bool = False
    late: Callable[[LateRead], None] | None = None


class RowResult(NamedTuple):
    """How one request ended; the buffer's content is the row only if `error` is None.

    seconds: time in the reading thread(s), both reads if the row was read again. restored: it is not from the disk but
    was made anew from the checkpoint.
    """

    layer: int
    expert: int
    nbytes: int
    seconds: float
    error: RowReadError | None
    restored: bool = False


class Pack:
    """An open pack. Safe for concurrent callers.

    verify: which reads are checked against the row's checksum: "always", "first-read" (until the row was good once)
    or "never". Checksums are computed in the reader's threads while other rows arrive.
    A row whose checksum is wrong goes into quarantine and is read once more, from the disk past the page cache; if it
    is still wrong, or the disk fails, `rebuild` makes it anew; without that, or if that fails too, it is an error. So
    is a row whose read does not return in time, at once.
    """

    def __init__(
        self,
        path: Path,
        header: PackHeader,
        data_start: int,
        checksums: npt.NDArray[np.uint64],
        file: tuple[int, int],
        reader: Reader,
        verify: VerifyMode,
        rebuild: Rebuild | None = None,
    ) -> None:
        self.path = path
        self.header = header
        self.checksums = checksums
        self._data_start = data_start
        self._reader = reader
        self._verify = verify
        self._good = bytearray(header.rows)
        self._lock = Lock()
        self._read_bytes = self._reread = 0
        self._failed: Counter[RowFailure] = Counter()
        self.quarantine = Quarantine(path, header, data_start, file, rebuild)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        expect: PackHeader | None = None,
        reader: Reader | None = None,
        verify: VerifyMode = "first-read",
        allow_absent: bool = False,
        rebuild: Rebuild | None = None,
    ) -> Pack:
        """Open a pack file; `expect` is what it must say about itself.

        reader: reads this file; it belongs to the pack from here on, also when opening fails. Default: pread.
        rebuild: makes damaged rows anew, such as `CheckpointRows`.
        allow_absent: open a pack that lacks rows too; reading one of them is an error of that row.
        Raises PackMissingError, PackIncompleteError, PackTruncatedError, PackCorruptError, PackMismatchError.
        """
        path = Path(path)
        try:
            if verify not in ("always", "first-read", "never"):
                raise ValueError(f"verify is {verify!r}; it can be always, first-read or never")
            header, data_start, checksums, file = _read_table(path)
            if expect is not None:
                check_expected(path, expect, header)
            absent = int((checksums == ABSENT).sum())
            if absent and not allow_absent:
                problem = f"{absent} of {header.rows} rows are absent; run `ziggurat pack` to build it"
                raise PackIncompleteError(path, problem)
            return cls(
                path, header, data_start, checksums, file, reader or PreadReader(path), verify, rebuild
            )
        except BaseException:
            if reader is not None:
                reader.close()
            raise

    @property
    def checksum_mismatches(self) -> int:
        """Reads whose bytes did not match their checksum so far, those repaired by reading again included."""
        return self.quarantine.mismatches

    @property
    def quarantined(self) -> list[tuple[int, int]]:
        """(layer id, expert) of the rows whose bytes were wrong when they were read last, in order."""
        found = [divmod(tag, self.header.experts) for tag in sorted(self.quarantine.tags)]
        return [(self.header.layer_ids[layer], expert) for layer, expert in found]

    def counts(self) -> PackCounts:
        """What reads met so far."""
        with self._lock:
            failed = self._failed
            reasons = failed["io"], failed["short"], failed["checksum"], failed["timeout"]
            reads = self._read_bytes, *reasons, self._reread
        return PackCounts(*reads, *self.quarantine.counts())

    @property
    def direct(self) -> bool:
        """True when rows are read past the page cache."""
        return self._reader.direct

    def read_rows(self, wanted: Sequence[RowRequest]) -> Generator[RowResult]:
        """Read rows straight into the requests' buffers and yield each one's end in order of completion.

        Reading starts when the generator is first advanced; when it ends, raises or is closed, no read is under way
        but those that were handed to their request's `late`.
        An error of one row is in its result and does not disturb the others.
        Raises IndexError for a row the pack does not have and ValueError for a row wanted twice or a buffer that is
        too small or cannot be written to, before anything is read.
        """
        header = self.header
        jobs: list[ReadJob] = []
        sole: set[int] = set()
        for layer, expert, buffer, stays, late in wanted:
            if not (0 <= layer < header.layers and 0 <= expert < header.experts):
                raise IndexError(
                    f"row ({layer}, {expert}): {self.path} has {header.layers} layers of {header.experts} experts"
                )
            if buffer.readonly or not buffer.c_contiguous or buffer.nbytes < header.stride:
                raise ValueError(
                    f"row ({layer}, {expert}) needs a writable, contiguous buffer of {header.stride} bytes"
                )
            offset = self._data_start + header.row_offset(layer, expert)
            tag = layer * header.experts + expert
            jobs.append(ReadJob(offset, buffer.cast("B")[: header.stride], tag, late))
            if stays:
                sole.add(jobs[-1].tag)
        if len({job.tag for job in jobs}) < len(jobs):
            raise ValueError("a row is wanted twice in one call")
        return self._read(jobs, set() if self._reader.direct else sole)

    def read_layers(self, layers: Sequence[int], memory: memoryview) -> Generator[RowResult]:
        """Whole layers (by index), one after another in the order of the file, into one piece of memory.

        memory: at least `len(layers) * experts * stride` bytes; row (layers[i], e) comes to (i * experts + e) * stride.
        The next layer is being read while the one before it ends, so ask for all that are wanted. As `read_rows`.
        """
        header = self.header
        needed = len(layers) * header.experts * header.stride
        if memory.readonly or not memory.c_contiguous or memory.nbytes < needed:
            raise ValueError(f"{len(layers)} layers need writable, contiguous memory of {needed} bytes")
        places = memory.cast("B")
        keys = [(layer, expert) for layer in layers for expert in range(header.experts)]
        return self.read_rows(
            [
                RowRequest(layer, expert, places[at * header.stride : (at + 1) * header.stride])
                for at, (layer, expert) in enumerate(keys)
            ]
        )

    def read_ahead(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Have the kernel read rows (layer index, expert) into the page cache, neighbours at once, without waiting.

        False, and nothing happens, where rows are read past the page cache: read them into the arena instead.
        """
        header = self.header
        starts = sorted({self._data_start + header.row_offset(layer, expert) for layer, expert in rows})
        pieces: list[tuple[int, int]] = []
        for start in starts:
            if pieces and sum(pieces[-1]) == start:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + header.stride)
            else:
                pieces.append((start, header.stride))
        return self._reader.read_ahead(pieces)

    def read_row(self, layer: int, expert: int) -> torch.Tensor:
        """One row's payload, uint8 `[row_bytes]`. Raises RowReadError."""
        buffer = aligned_buffer(self.header.stride)
        (result,) = self.read_rows([RowRequest(layer, expert, buffer)])
        if result.error is not None:
            raise result.error
        return torch.frombuffer(buffer, dtype=torch.uint8, count=self.header.row_bytes)

    def close(self) -> None:
        """Wait for reads in progress and let the file go."""
        self._reader.close()

    def _read(self, jobs: list[ReadJob], sole: set[int]) -> Generator[RowResult]:
        present: list[ReadJob] = []
        suspect: list[ReadJob] = []
        quarantined = self.quarantine.tags
        for job in jobs:
            if self._checksum(job.tag) == ABSENT:
                yield self._bad(job.tag, 0, 0.0, "absent", "the row was never written; run `ziggurat pack`")
            else:
                (suspect if job.tag in quarantined else present).append(job)
        spent: dict[int, float] = {}
        for wanted, fresh in ((present, False), (suspect, True)):
            if wanted:
                spent |= yield from self._attempt(wanted, {}, sole, fresh=fresh, last=False)
        if spent:
            again = [job for job in jobs if job.tag in spent]
            yield from self._attempt(again, spent, sole, fresh=True, last=True)

    def _attempt(
        self, jobs: list[ReadJob], before: dict[int, float], sole: set[int], *, fresh: bool, last: bool
    ) -> Generator[RowResult, None, dict[int, float]]:
        """Read once and yield the rows that are good or, on the `last` attempt, have a wrong checksum.

        Returns the rows to read again and the seconds they took so far. fresh: from the disk, past the page cache.
        sole: tags of the rows that leave the page cache as soon as they have arrived; a row that turns out to be bad
        is read from the disk again anyway.
        """
        digests: dict[int, int] = {}
        again: dict[int, float] = {}
        waiting = {job.tag: job.buffer for job in jobs}
        stride = self.header.stride
        arrived = 0
        failed: Counter[RowFailure] = Counter()
        try:
            with closing(self._reader.read(jobs, self._on_arrival(digests, sole), fresh=fresh)) as ends:
                for tag, nbytes, seconds, error in ends:
                    buffer = waiting.pop(tag)
                    seconds += before.get(tag, 0.0)
                    arrived += nbytes
                    if isinstance(error, ReadTimeoutError):
                        # Not made anew: the buffer is not ours any more, and the checkpoint may be on the same disk.
                        failed["timeout"] += 1
                        yield self._bad(tag, nbytes, seconds, "timeout", str(error))
                    elif error is not None:
                        failed["io"] += 1
                        yield self._restored(tag, buffer, nbytes, seconds, "io", str(error), None)
                    elif nbytes != stride:
                        failed["short"] += 1
                        reason = f"{nbytes} of {stride} bytes arrived"
                        yield self._restored(tag, buffer, nbytes, seconds, "short", reason, None)
                    elif tag not in digests or digests[tag] == self._checksum(tag):
                        if tag in digests:
                            self._good[tag] = 1
                            self.quarantine.good(tag)
                        yield RowResult(*divmod(tag, self.header.experts), nbytes, seconds, None)
                    else:
                        failed["checksum"] += 1
                        self._good[tag] = 0
                        self.quarantine.mismatch(tag)
                        if last:
                            reason = _DAMAGED.format(f"{digests[tag]:016x}, not {self._checksum(tag):016x}")
                            yield self._restored(
                                tag, buffer, nbytes, seconds, "checksum", reason, digests[tag]
                            )
                        else:
                            again[tag] = seconds
        except OSError as e:  # the reader cannot go on, for want of descriptors or memory
            failed["io"] += len(waiting)
            for tag, buffer in waiting.items():
                yield self._restored(tag, buffer, 0, before.get(tag, 0.0), "io", str(e), None)
        finally:
            with self._lock:
                self._read_bytes += arrived
                self._failed += failed
                self._reread += len(jobs) if last else 0
        return again

    def _restored(
        self,
        tag: int,
        buffer: memoryview,
        nbytes: int,
        seconds: float,
        kind: RowFailure,
        reason: str,
        found: int | None,
    ) -> RowResult:
        """The end of a row that the disk does not give: made anew, or its error."""
        if self.quarantine.can_rebuild:
            start = perf_counter()
            try:
                self.checksums.flat[tag] = self.quarantine.restore(tag, buffer, self._checksum(tag), found)
            except RebuildError as e:
                reason = f"{reason}; {e}"
            else:
                spent = seconds + perf_counter() - start
                return RowResult(*divmod(tag, self.header.experts), self.header.stride, spent, None, True)
        return self._bad(tag, nbytes, seconds, kind, reason)

    def _on_arrival(self, digests: dict[int, int], sole: set[int]) -> Arrived | None:
        """What the reading threads do with a row that arrived: compute its digest if it is to be checked, and give its
        pages back if they would be a second copy."""
        if self._verify == "never" and not sole:
            return None
        always, never = self._verify == "always", self._verify == "never"

        def arrived(job: ReadJob) -> None:
            if always or not (never or self._good[job.tag]):
                digests[job.tag] = row_digest(job.buffer)
            if job.tag in sole:
                self._reader.forget(job.offset, job.buffer.nbytes)

        return arrived

    def _checksum(self, tag: int) -> int:
        return int(self.checksums.flat[tag])

    def _bad(self, tag: int, nbytes: int, seconds: float, kind: RowFailure, reason: str) -> RowResult:
        layer, expert = divmod(tag, self.header.experts)
        error = RowReadError(self.header.layer_ids[layer], expert, self.path, reason, kind)
        return RowResult(layer, expert, nbytes, seconds, error)


def _read_table(path: Path) -> tuple[PackHeader, int, npt.NDArray[np.uint64], tuple[int, int]]:
    """Header, start of the data section and checksum table of a pack file, and which file it is: (device, inode)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as e:
        if path.with_name(path.name + BUILDING_SUFFIX).exists():
            problem = "its build was not finished; run `ziggurat pack` to finish it"
            raise PackIncompleteError(path, problem) from e
        raise PackMissingError(path, "there is no such pack; run `ziggurat pack` to build it") from e
    except OSError as e:
        raise PackError(path, f"cannot be opened: {e.strerror}") from e
    try:
        header, data_start = read_pack_header(path, fd)
        file = os.fstat(fd)
        return header, data_start, read_checksums(fd, header, data_start), (file.st_dev, file.st_ino)
    except OSError as e:
        raise PackError(path, f"cannot be read: {e.strerror}") from e
    finally:
        os.close(fd)


def read_checksums(fd: int, header: PackHeader, data_start: int) -> npt.NDArray[np.uint64]:
    """The checksum table, u64 `[layers, experts]`. Raises OSError if the file ends before it does."""
    raw = bytearray()
    start, length = data_start + header.rows_nbytes, header.rows * CHECKSUM_BYTES
    while len(raw) < length:
        piece = os.pread(fd, length - len(raw), start + len(raw))
        if not piece:
            raise OSError(errno.EIO, "the file ends inside its checksums")
        raw += piece
    return np.frombuffer(raw, dtype="<u8").reshape(header.layers, header.experts)
