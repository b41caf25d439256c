"""Rows by `preadv` in a pool of threads, past the page cache where the filesystem allows it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import Arrived, DirectMode, ReadDone, ReadJob

# Direct I/O needs offset, length and address aligned to the device's block size; 4 KiB suits every common one.
DIRECT_ALIGNMENT = 4096
_QUEUED_PER_THREAD = 2  # keeps threads busy while the caller handles what it got

Preadv = Callable[[int, list[memoryview], int], int]


class PreadReader:
    """A `Reader` with `threads` threads; at most twice as many jobs of one `read` are under way at a time.

    direct: "auto" uses direct I/O for every job that is aligned for it, if the filesystem takes it, and buffered
    reads otherwise; "always" refuses both to fall back and to run a misaligned job; "never" reads buffered.
    preadv: the system call, for tests.
    Raises ReaderError if the file cannot be opened this way.
    """

    name = "pread"

    def __init__(
        self, path: Path, *, threads: int = 8, direct: DirectMode = "auto", preadv: Preadv = os.preadv
    ) -> None:
        if threads < 1:
            raise ReaderError(f"a reader needs at least one thread, not {threads}")
        if direct not in ("auto", "always", "never"):
            raise ReaderError(f"direct is {direct!r}; it can be auto, always or never")
        self._path = path
        self._preadv = preadv
        self._always = direct == "always"
        try:
            self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise ReaderError(f"{path}: cannot be opened: {e.strerror}") from e
        try:
            self._direct = None if direct == "never" else self._open_direct()
            if self._always and self._direct is None:
                raise ReaderError(
                    f"{path}: its filesystem does not take direct I/O; set tiers.disk.direct to auto or never"
                )
        except BaseException:
            os.close(self._buffered)
            raise
        self._queued = _QUEUED_PER_THREAD * threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-pread")
        self._closed = False

    @property
    def direct(self) -> bool:
        return self._direct is not None

    def read(self, jobs: Iterable[ReadJob], arrived: Arrived | None = None) -> Generator[ReadDone]:
        if self._closed:
            raise ValueError(f"the reader of {self._path} is closed")
        work = list(jobs)
        for job in work:
            self._check(job)
        return self._read(work, arrived)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        if not self._closed:
            self._closed = True
            os.close(self._buffered)
            if self._direct is not None:
                os.close(self._direct)

    def _read(self, work: list[ReadJob], arrived: Arrived | None) -> Generator[ReadDone]:
        ended: SimpleQueue[Future[ReadDone]] = SimpleQueue()
        waiting = iter(work)
        running: set[Future[ReadDone]] = set()

        def start(count: int) -> None:
            for job in islice(waiting, count):
                try:
                    future = self._threads.submit(self._run, job, arrived)
                except RuntimeError as e:  # the pool was shut down
                    raise ValueError(f"the reader of {self._path} is closed") from e
                running.add(future)
                future.add_done_callback(ended.put)

        try:
            start(self._queued)
            while running:
                future = ended.get()
                running.discard(future)
                start(1)
                yield future.result()
        finally:
            # Nothing may write to the caller's buffers after this, whatever ended the loop.
            wait([future for future in running if not future.cancel()])

    def _run(self, job: ReadJob, arrived: Arrived | None) -> ReadDone:
        start = perf_counter()
        nbytes, error = self._fill(job)
        seconds = perf_counter() - start
        if error is None and arrived is not None:
            arrived(job)
        return ReadDone(job.tag, nbytes, seconds, error)

    def _fill(self, job: ReadJob) -> tuple[int, OSError | None]:
        """Read until the buffer is full: short reads go on where they stopped."""
        view = job.buffer.cast("B") if job.buffer.format != "B" or job.buffer.ndim != 1 else job.buffer
        total, done = len(view), 0
        direct = self._direct if _is_aligned(job.offset, view) else None
        while done < total:
            aligned = done % DIRECT_ALIGNMENT == 0
            fd = direct if direct is not None and aligned else self._buffered
            try:
                count = self._preadv(fd, [view[done:]], job.offset + done)
            except InterruptedError:
                continue
            except OSError as e:
                if e.errno == errno.EINVAL and fd != self._buffered and not self._always:
                    direct = None  # a filesystem that opens for direct I/O and then refuses some of it
                    continue
                return done, e
            if count == 0:
                return done, OSError(
                    errno.EIO, f"the file ends after {done} of {total} bytes at {job.offset}"
                )
            done += count
        return done, None

    def _check(self, job: ReadJob) -> None:
        if job.offset < 0:
            raise ValueError(f"job {job.tag}: offset {job.offset} is negative")
        if job.buffer.readonly or not job.buffer.c_contiguous or not job.buffer.nbytes:
            raise ValueError(f"job {job.tag}: the buffer is read-only, not contiguous or empty")
        if self._always and not _is_aligned(job.offset, job.buffer):
            raise ValueError(
                f"job {job.tag}: direct I/O needs offset, size and address to be multiples of {DIRECT_ALIGNMENT}"
            )

    def _open_direct(self) -> int | None:
        """A descriptor for direct I/O, or None if the filesystem refuses it at open or at the first read."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None
        try:
            os.preadv(fd, [aligned_buffer(DIRECT_ALIGNMENT)], 0)
        except OSError:
            os.close(fd)
            return None
        return fd


def _is_aligned(offset: int, buffer: memoryview) -> bool:
    if offset % DIRECT_ALIGNMENT or buffer.nbytes % DIRECT_ALIGNMENT:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % DIRECT_ALIGNMENT == 0
