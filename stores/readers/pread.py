"""Rows by `preadv` in a pool of threads, past the page cache where the filesystem allows it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Condition
from time import perf_counter

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import Arrived, DirectMode, ReadDone, ReadJob
from ziggurat.stores.readers.files import DIRECT_ALIGNMENT, ReadableFile
from ziggurat.stores.readers.operations import (
    MAX_INFLIGHT_BYTES,
    Operation,
    Queue,
    merge_limit,
    plan_operations,
)

# A thread serves one caller for this much before the next caller's turn: a few rows must not wait for a large batch.
_TURN_BYTES = 8 << 20

Preadv = Callable[[int, list[memoryview], int], int]


class PreadReader:
    """A `Reader` with `threads` threads, which bounds the reads under way at a time.

    Jobs of one `read` are run in order of offset, neighbours as one call. Where many bytes are under way at once (large
    rows, many threads), fewer threads take part, so that at most `inflight_bytes` are (or one row).
    direct: see `ReadableFile`. preadv: the system call, for tests.
    Raises ReaderError if the file cannot be opened this way.
    """

    name = "pread"

    def __init__(
        self,
        path: Path,
        *,
        threads: int = 8,
        direct: DirectMode = "auto",
        inflight_bytes: int = MAX_INFLIGHT_BYTES,
        preadv: Preadv = os.preadv,
    ) -> None:
        if threads < 1:
            raise ReaderError(f"a reader needs at least one thread, not {threads}")
        self._file = ReadableFile(path, direct)
        self._preadv = preadv
        self._width = threads
        self._inflight_bytes = inflight_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-pread")
        self._closed = False

    @property
    def direct(self) -> bool:
        return self._file.direct is not None

    def read(
        self, jobs: Iterable[ReadJob], arrived: Arrived | None = None, *, fresh: bool = False
    ) -> Generator[ReadDone]:
        if self._closed:
            raise ValueError(f"the reader of {self._file.path} is closed")
        work = list(jobs)
        for job in work:
            self._file.check(job)
        return self._read(work, arrived, fresh)

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        return self._file.read_ahead(pieces)

    def forget(self, offset: int, nbytes: int) -> None:
        self._file.release(offset, nbytes)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=True)
        self._file.close()

    def _read(self, work: list[ReadJob], arrived: Arrived | None, fresh: bool) -> Generator[ReadDone]:
        if not work:
            return
        limit = merge_limit(work, self._width)
        largest = max(limit, max(job.buffer.nbytes for job in work))
        width = max(1, min(self._width, len(work), self._inflight_bytes // largest))
        batch = _Batch(Queue(plan_operations(work, limit, fresh=fresh)), arrived, self._fill)
        try:
            for _ in range(width):
                batch.start(self._threads)
            for _ in work:
                end = batch.ended.get()
                if isinstance(end, BaseException):
                    raise end
                yield end
        finally:
            # Nothing may write to the caller's buffers after this, whatever ended the loop.
            batch.stop()

    def _fill(self, operation: Operation) -> OSError | None:
        """Read until the buffers are full: short reads go on where they stopped."""
        file = self._file
        if operation.fresh:
            file.forget(operation.offset, operation.nbytes)
        direct = file.direct if operation.aligned else None
        while operation.done < operation.nbytes:
            aligned = operation.done % DIRECT_ALIGNMENT == 0
            fd = direct if direct is not None and aligned else file.buffered
            try:
                count = self._preadv(fd, operation.rest()[0], operation.offset + operation.done)
            except InterruptedError:
                continue
            except OSError as e:
                if e.errno == errno.EINVAL and fd != file.buffered and not file.always:
                    direct = None  # a filesystem that opens for direct I/O and then refuses some of it
                    continue
                return e
            if count == 0:
                return operation.file_end()
            operation.done += count
        return None


class _Batch:
    """The operations of one `read`, taken by several threads in turn."""

    def __init__(
        self,
        waiting: Queue,
        arrived: Arrived | None,
        fill: Callable[[Operation], OSError | None],
    ) -> None:
        self.ended: SimpleQueue[ReadDone | BaseException] = SimpleQueue()
        self._waiting = waiting
        self._arrived = arrived
        self._fill = fill
        self._stopped = False
        self._active = 0
        self._changed = Condition()

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Have one more thread work on it."""
        with self._changed:
            self._active += 1
        try:
            threads.submit(self._turn, threads)
        except RuntimeError as e:  # the pool was shut down
            self._leave()
            raise ValueError("the reader is closed") from e

    def stop(self) -> None:
        """Wait until no thread works on it; operations that have not begun never will."""
        self._stopped = True
        with self._changed:
            while self._active:
                self._changed.wait()

    def _turn(self, threads: ThreadPoolExecutor) -> None:
        left = _TURN_BYTES
        try:
            while left > 0 and not self._stopped:
                operation = self._waiting.take()
                if operation is None:
                    return
                left -= operation.nbytes
                self._run(operation)
            if not self._stopped:
                self.start(threads)
        except BaseException as e:  # noqa: BLE001  # raised by the generator, whatever it is
            self.ended.put(e)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def _run(self, operation: Operation) -> None:
        start = perf_counter()
        error = self._fill(operation)
        operation.seconds += perf_counter() - start
        if error is None:
            self._report(operation.ends(), operation.jobs)
            return
        ends, good, again = operation.failed(error)
        self._waiting.put_back(again)
        self._report(ends, good)

    def _report(self, ends: Sequence[ReadDone], good: Sequence[ReadJob]) -> None:
        for place, end in enumerate(ends):
            if self._arrived is not None and end.error is None and not self._stopped:
                self._arrived(good[place])
            self.ended.put(end)
