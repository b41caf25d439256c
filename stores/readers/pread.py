"""Rows by `preadv` in a pool of threads, past the page cache where the filesystem allows it."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Lock
from time import perf_counter

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import Arrived, DirectMode, ReadDone, ReadJob
from ziggurat.stores.readers.files import DIRECT_ALIGNMENT, ReadableFile
from ziggurat.stores.readers.late import GRACE, LateRead, LateReads
from ziggurat.stores.readers.operations import (
    MAX_INFLIGHT_BYTES,
    Operation,
    Queue,
    merge_limit,
    plan_operations,
)
from ziggurat.stores.readers.threads import DaemonThreads

# A thread serves one caller for this much before the next caller's turn: a few rows must not wait for a large batch.
_TURN_BYTES = 8 << 20

Preadv = Callable[[int, list[memoryview], int], int]


class PreadReader:
    """A `Reader` with `threads` threads, which bounds the reads under way at a time.

    Jobs of one `read` are run in order of offset, neighbours as one call. Where many bytes are under way at once (large
    rows, many threads), fewer threads take part, so that at most `inflight_bytes` are (or one row).
    direct: see `ReadableFile`. preadv: the system call, for tests.
    timeout: seconds after which a read is given up; None waits for ever. Its thread is lost until the kernel answers;
    while all are, reads fail at once.
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
        timeout: float | None = None,
    ) -> None:
        if threads < 1:
            raise ReaderError(f"a reader needs at least one thread, not {threads}")
        self.file = ReadableFile(path, direct)
        self.timeout = timeout
        self.late = LateReads(threads)
        self.threads = DaemonThreads(threads, "ziggurat-pread")
        self._preadv = preadv
        self._width = threads
        self._inflight_bytes = inflight_bytes
        self._running: set[_Batch] = set()
        self._lock = Lock()
        self._closed = False

    @property
    def direct(self) -> bool:
        return self.file.direct is not None

    def read(
        self, jobs: Iterable[ReadJob], arrived: Arrived | None = None, *, fresh: bool = False
    ) -> Generator[ReadDone]:
        if self._closed:
            raise ValueError(f"the reader of {self.file.path} is closed")
        work = list(jobs)
        for job in work:
            self.file.check(job)
        return self._read(work, arrived, fresh)

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        return self.file.read_ahead(pieces)

    def forget(self, offset: int, nbytes: int) -> None:
        self.file.release(offset, nbytes)

    def close(self) -> None:
        self._closed = True
        if not self.threads.close(GRACE):
            with self._lock:
                running = list(self._running)
            for batch in running:
                batch.interrupt()
            while not self.threads.close(GRACE):
                if self.late.count:
                    return  # closing the file may hang as well, and a thread that comes back may want its number
        self.file.close()

    def _read(self, work: list[ReadJob], arrived: Arrived | None, fresh: bool) -> Generator[ReadDone]:
        if not work:
            return
        limit = merge_limit(work, self._width)
        largest = max(limit, max(job.buffer.nbytes for job in work))
        width = max(1, min(self._width, len(work), self._inflight_bytes // largest))
        batch = _Batch(self, Queue(plan_operations(work, limit, fresh=fresh)), arrived)
        with self._lock:
            self._running.add(batch)
        try:
            for _ in range(width):
                batch.start()
            for _ in work:
                yield batch.next()
        finally:
            # Nothing may write to the caller's buffers after this, whatever ended the loop, but for late reads.
            batch.stop()
            with self._lock:
                self._running.discard(batch)

    def fill(self, operation: Operation, given_up: Callable[[], bool]) -> OSError | None:
        """Read until the buffers are full: short reads go on where they stopped, unless nobody wants them any more."""
        file = self.file
        if operation.fresh:
            file.forget(operation.offset, operation.nbytes)
        direct = file.direct if operation.aligned else None
        while operation.done < operation.nbytes and not given_up():
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

    def __init__(self, reader: PreadReader, waiting: Queue, arrived: Arrived | None) -> None:
        self._reader = reader
        self._waiting = waiting
        self._arrived = arrived
        self._ended: SimpleQueue[ReadDone | BaseException] = SimpleQueue()
        self._given_up: deque[ReadDone] = deque()
        self._stopped = False
        self._active = 0  # threads that serve it, but for those that are lost
        self._running: dict[Operation, float] = {}  # in the kernel's hands, and since when
        self._lost: dict[Operation, LateRead] = {}
        self._changed = Condition()

    def start(self) -> None:
        """Have one more thread work on it."""
        try:
            self._reader.threads.submit(self._turn)
        except RuntimeError as e:  # the pool was closed
            raise ValueError(f"the reader of {self._reader.file.path} is closed") from e

    def next(self) -> ReadDone:
        """Wait for the next end. Raises what a thread has raised."""
        timeout = self._reader.timeout
        begun = perf_counter()
        while not self._given_up:
            if timeout is not None and self._reader.late.full:
                self._refuse(perf_counter() - begun)
                if self._given_up:
                    break
            try:
                end = self._ended.get(timeout=None if timeout is None else self._patience(timeout))
            except Empty:
                assert timeout is not None
                self._given_up += self._give_up(timeout)
                continue
            if isinstance(end, BaseException):
                raise end
            return end
        return self._given_up.popleft()

    def interrupt(self) -> None:
        """Have `next` raise that the reader is closed, from any thread."""
        self._ended.put(ValueError(f"the reader of {self._reader.file.path} is closed"))

    def stop(self) -> None:
        """Wait until no thread works on it; operations that have not begun never will."""
        with self._changed:
            self._stopped = True
            if not self._changed.wait_for(lambda: not self._active, GRACE):
                self._give_up(0.0)
                self._changed.wait_for(lambda: not self._active)

    def _patience(self, timeout: float) -> float:
        """Seconds until the next read has taken too long."""
        with self._changed:
            since = min(
                (at for operation, at in self._running.items() if operation.can_be_late), default=None
            )
        return timeout if since is None else max(0.0, since + timeout - perf_counter())

    def _give_up(self, seconds: float) -> list[ReadDone]:
        """The ends of reads that began so long ago; their threads are lost."""
        reader = self._reader
        ends: list[ReadDone] = []
        now = perf_counter()
        with self._changed:
            for operation, begun in list(self._running.items()):
                if operation.can_be_late and now - begun >= seconds:
                    del self._running[operation]
                    self._active -= 1
                    late = self._lost[operation] = reader.late.begin()
                    operation.hand_over(late)
                    ends += operation.timed_out(reader.file.path, now - begun)
                    if not self._stopped:
                        self.start()  # what has not begun needs another thread
        return ends

    def _refuse(self, seconds: float) -> None:
        """Nobody is left to read what has not begun."""
        while (operation := self._waiting.take()) is not None:
            self._given_up += operation.timed_out(self._reader.file.path, seconds, begun=False)

    def _turn(self) -> None:
        with self._changed:
            if self._stopped:
                return
            self._active += 1
        left = _TURN_BYTES
        lost = False
        try:
            while left > 0 and not self._stopped and not lost:
                operation = self._waiting.take()
                if operation is None:
                    return
                left -= operation.nbytes
                lost = self._run(operation)
            if not self._stopped:
                self.start()
        except BaseException as e:  # noqa: BLE001  # raised by the generator, whatever it is
            self._ended.put(e)
        finally:
            if not lost:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

    def _run(self, operation: Operation) -> bool:
        """Read and report; True if it was given up meanwhile."""
        start = perf_counter()
        broken: BaseException | None = None
        error: OSError | None = None
        with self._changed:
            self._running[operation] = start
        try:
            error = self._reader.fill(operation, lambda: operation in self._lost)
        except BaseException as e:  # noqa: BLE001  # raised below, unless nobody waits for it any more
            broken = e
        with self._changed:
            self._running.pop(operation, None)
            late = self._lost.pop(operation, None)
        if late is not None:
            late.finish()
            return True
        if broken is not None:
            raise broken
        operation.seconds += perf_counter() - start
        if error is None:
            self._report(operation.ends(), operation.jobs)
            return False
        ends, good, again = operation.failed(error)
        self._waiting.put_back(again)
        self._report(ends, good)
        return False

    def _report(self, ends: Sequence[ReadDone], good: Sequence[ReadJob]) -> None:
        for place, end in enumerate(ends):
            if self._arrived is not None and end.error is None and not self._stopped:
                self._arrived(good[place])
            self._ended.put(end)
