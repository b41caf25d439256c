"""Rows by io_uring: many reads under way from one thread, straight into the caller's memory.

The thread that advances the generator drives the ring; a pool of threads runs `arrived` (checksums), so that reading
goes on meanwhile. Each `read` that runs has a ring of its own, from a stock, so that concurrent callers do not wait for
each other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from ctypes import addressof, c_uint64
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from time import perf_counter
from typing import NamedTuple

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers import ring as io
from ziggurat.stores.readers.base import Arrived, DirectMode, ReadDone, ReadJob
from ziggurat.stores.readers.files import DIRECT_ALIGNMENT, ReadableFile, address_of
from ziggurat.stores.readers.operations import (
    MAX_INFLIGHT_BYTES,
    Operation,
    Queue,
    merge_limit,
    plan_operations,
)

_WAKE = 0  # user_data of the event that tells the ring's thread that a checksum is ready
_CANCEL = 1
_FIRST_OPERATION = 2
_MAX_READ = 1 << 30  # one read call's limit is just under 2 GiB
_BUFFERED_ASYNC_BYTES = 1 << 20  # buffered reads this large are copied by the kernel's own threads
_IDLE_RINGS = 8
_MERGED_WIDTH = 8  # reads of merged rows that should be under way at a time
_SPARE_ENTRIES = 4  # for the event and the cancellation


class UringReader:
    """A `Reader` over io_uring. depth: reads under way of one `read`; `inflight_bytes` bounds their bytes (or one row).

    threads: for `arrived`. direct: see `ReadableFile`.
    Raises ReaderError if the file cannot be opened this way or io_uring cannot be used, saying why.
    """

    name = "io_uring"

    def __init__(
        self,
        path: Path,
        *,
        threads: int = 8,
        direct: DirectMode = "auto",
        depth: int = 64,
        inflight_bytes: int = MAX_INFLIGHT_BYTES,
    ) -> None:
        if threads < 1 or depth < 1:
            raise ReaderError(f"a reader needs at least one thread and one read, not {min(threads, depth)}")
        if reason := io.problem():
            raise ReaderError(f"{path}: {reason}; set tiers.disk.reader to pread")
        self.file = ReadableFile(path, direct)
        self.depth = depth
        self.inflight_bytes = inflight_bytes
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-arrived")
        self._idle: list[_EventRing] = []
        self._running: set[_Session] = set()
        self._memory: tuple[int, int] | None = None
        self._lock = Lock()
        self._closed = False

    @property
    def direct(self) -> bool:
        return self.file.direct is not None

    def read(
        self, jobs: Iterable[ReadJob], arrived: Arrived | None = None, *, fresh: bool = False
    ) -> Generator[ReadDone]:
        if self._closed:
            raise self._closed_error()
        work = list(jobs)
        for job in work:
            self.file.check(job)
        return self._read(work, arrived, fresh)

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        return self.file.read_ahead(pieces)

    def forget(self, offset: int, nbytes: int) -> None:
        self.file.release(offset, nbytes)

    def register_memory(self, memory: memoryview) -> bool:
        """Pin memory that most reads go to once, for reads that begin later. It must outlive the reader.

        False, without harm, where a limit on locked memory is in the way.
        """
        trial = io.Ring(2)
        try:
            place = (address_of(memory), memory.nbytes)
            if not trial.register_memory(*place):
                return False
        finally:
            trial.close()
        with self._lock:
            self._memory = place
            old, self._idle = self._idle, []
        for ring in old:
            ring.close()
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = list(self._running)
        for session in running:
            session.finish()
        self.threads.shutdown(wait=True)
        with self._lock:
            idle, self._idle = self._idle, []
        for ring in idle:
            ring.close()
        self.file.close()

    def _read(self, work: list[ReadJob], arrived: Arrived | None, fresh: bool) -> Generator[ReadDone]:
        if not work:
            return
        limit = merge_limit(work, min(self.depth, _MERGED_WIDTH))
        operations = plan_operations(work, limit, fresh=fresh)
        with self._lock:
            if self._closed:
                raise self._closed_error()
            session = _Session(
                self, self._idle.pop() if self._idle else self._new_ring(), operations, arrived
            )
            self._running.add(session)
        try:
            while ends := session.step():
                yield from ends
        finally:
            session.finish()
            with self._lock:
                self._running.discard(session)
                keep = not self._closed and session.ring.clean and len(self._idle) < _IDLE_RINGS
                if keep:
                    self._idle.append(session.ring)
            if not keep:
                session.ring.close()

    def _new_ring(self) -> _EventRing:
        ring = _EventRing(self.depth + _SPARE_ENTRIES)
        file = self.file
        ring.register_files([file.buffered, file.buffered if file.direct is None else file.direct])
        if self._memory is not None:
            ring.register_memory(*self._memory)
        return ring

    def _closed_error(self) -> ValueError:
        return ValueError(f"the reader of {self.file.path} is closed")


class _EventRing(io.Ring):
    """A ring that other threads can wake."""

    def __init__(self, entries: int) -> None:
        super().__init__(entries)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._event_lock = Lock()
        self._armed = False
        self.clean = True

    def arm(self) -> None:
        if not self._armed:
            self.push(io.POLL_ADD, _WAKE, fd=self._event, operation_flags=1)  # POLLIN
            self._armed = True

    def wake(self) -> None:
        """From any thread, also when the ring is closed."""
        with self._event_lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def woken(self) -> None:
        self._armed = False
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        super().close()
        with self._event_lock:
            os.close(self._event)
            self._event = -1


class _UnderWay(NamedTuple):
    """A read. keep: memory that its entry names. entry: `Ring.pushed` before it was added."""

    operation: Operation
    since: float
    keep: object
    entry: int


class _Session:
    """One `read` that runs. Its lock is held while the ring is used, so that another thread may end it."""

    def __init__(
        self, reader: UringReader, ring: _EventRing, operations: Iterator[Operation], arrived: Arrived | None
    ) -> None:
        self.ring = ring
        self._reader = reader
        self._waiting = Queue(operations)
        self._next: Operation | None = None
        self._arrived = arrived
        self._under_way: dict[int, _UnderWay] = {}
        self._bytes = 0
        self._number = _FIRST_OPERATION
        self._hashing: set[Future[None]] = set()
        self._hashes = 0
        self._hashed: SimpleQueue[ReadDone | BaseException] = SimpleQueue()
        self._finished = False
        self._lock = Lock()

    def step(self) -> list[ReadDone]:
        """Wait for the next ends; empty when there are no more. Raises what `arrived` raised."""
        with self._lock:
            while True:
                if self._finished:
                    raise ValueError(f"the reader of {self._reader.file.path} is closed")
                self._launch()
                ends = self._reap()
                if self._under_way and not ends:
                    self.ring.arm()
                    self.ring.enter(True)
                    ends = self._reap()
                elif not ends and self._hashes:
                    ends.append(self._take(self._hashed.get()))
                while True:
                    try:
                        ends.append(self._take(self._hashed.get_nowait()))
                    except Empty:
                        break
                if ends:
                    self._launch()  # the disk stays busy while the caller looks at these
                    return ends
                self._launch()  # what is to be tried again
                if not (self._under_way or self._hashes):
                    return []

    def finish(self) -> None:
        """Cancel and wait until nothing writes to the caller's buffers. Idempotent; from any thread."""
        self._finished = True
        self.ring.wake()  # the thread that waits for this session lets the lock go
        with self._lock:
            interrupt: BaseException | None = None
            self._forget_unpushed()
            try:
                self._cancel()
            except OSError:
                self.ring.clean = False
            while self._under_way:
                try:
                    self.ring.enter(True)
                    self._reap()
                except OSError:
                    self.ring.clean = False  # a broken ring: closing it is all that is left
                    break
                except BaseException as e:  # noqa: BLE001  # a signal: buffers may be given back only after the reads
                    interrupt = e
            wait([future for future in list(self._hashing) if not future.cancel()])
            self._hashing.clear()
            if interrupt is not None:
                raise interrupt

    def _forget_unpushed(self) -> None:
        """A signal's exception may have come between the note of a read and its entry, which then never ends."""
        for number, read in list(self._under_way.items())[-1:]:
            if read.entry == self.ring.pushed:
                del self._under_way[number]

    def _cancel(self) -> None:
        self._waiting.clear()
        self._next = None
        for number in list(self._under_way):
            self.ring.push(io.ASYNC_CANCEL, _CANCEL, address=number)
            self.ring.enter(False)  # one at a time: the ring has little room for more

    def _launch(self) -> None:
        """Start as many operations as depth and bytes allow."""
        reader = self._reader
        started = False
        while len(self._under_way) < reader.depth:
            operation = self._next or self._waiting.take()
            if operation is None:
                break
            if self._under_way and self._bytes + operation.nbytes > reader.inflight_bytes:
                self._next = operation
                break
            self._next = None
            if operation.fresh and not operation.done:
                reader.file.forget(operation.offset, operation.nbytes)
            self._push(operation)
            started = True
        if started:
            self.ring.enter(False)

    def _push(self, operation: Operation) -> None:
        ring, file = self.ring, self._reader.file
        direct = file.direct is not None and operation.aligned and operation.done % DIRECT_ALIGNMENT == 0
        views, addresses = operation.rest()
        nbytes = min(operation.nbytes - operation.done, _MAX_READ)
        position, flags = (1, 0) if direct else (0, 0)
        if not direct and nbytes >= _BUFFERED_ASYNC_BYTES:
            flags |= io.ASYNC
        if ring.fixed_files:
            fd, flags = position, flags | io.FIXED_FILE
        else:
            fd = file.direct if direct and file.direct is not None else file.buffered
        self._number += 1
        self._bytes += operation.nbytes
        number, entry = self._number, ring.pushed
        offset = operation.offset + operation.done
        if len(views) == 1 or _are_one(views, addresses):
            fixed = ring.fixed_at(addresses[0], nbytes)
            opcode = io.READ if fixed is None else io.READ_FIXED
            # Before its entry is added: from then on the kernel may write to the caller's memory at any time.
            self._under_way[number] = _UnderWay(operation, perf_counter(), None, entry)
            ring.push(
                opcode, number, fd=fd, address=addresses[0], length=nbytes, offset=offset, flags=flags,
                buffer=fixed or 0,
            )  # fmt: skip
        else:
            vectors = (c_uint64 * (2 * len(views)))(
                *(number for pair in zip(addresses, map(len, views), strict=True) for number in pair)
            )
            self._under_way[number] = _UnderWay(operation, perf_counter(), vectors, entry)
            ring.push(
                io.READV, number, fd=fd, address=addressof(vectors), length=len(views), offset=offset,
                flags=flags,
            )  # fmt: skip

    def _reap(self) -> list[ReadDone]:
        ends: list[ReadDone] = []
        good: list[tuple[ReadJob, ReadDone]] = []
        for number, result in self.ring.reap():
            if number < _FIRST_OPERATION:
                if number == _WAKE:
                    self.ring.woken()
                continue
            read = self._under_way.pop(number)
            operation = read.operation
            self._bytes -= operation.nbytes
            operation.seconds += perf_counter() - read.since
            error = self._judge(operation, result)
            if error is not None:
                failed, jobs, again = operation.failed(error)
                self._waiting.put_back(again)
                if self._arrived is not None and jobs:
                    good += zip(jobs, failed, strict=True)
                else:
                    ends += failed
            elif operation.done < operation.nbytes:
                self._waiting.put_back([operation])
            elif self._arrived is not None:
                good += zip(operation.jobs, operation.ends(), strict=True)
            else:
                ends += operation.ends()
        if good and not self._finished:
            self._hash(good)
        return ends

    def _judge(self, operation: Operation, result: int) -> OSError | None:
        """Book what a read brought. An error that another try may cure is none: the operation is not done yet."""
        if result > 0:
            operation.done += result
            return None
        if result == 0:
            return operation.file_end()
        number = -result
        if number in (errno.EINTR, errno.EAGAIN) or (number == errno.ECANCELED and not self._finished):
            return None  # also a read whose thread has ended
        if number == errno.EINVAL and operation.aligned and not self._reader.file.always:
            operation.aligned = False  # a filesystem that opens for direct I/O and then refuses some of it
            return None
        return OSError(number, os.strerror(number))

    def _hash(self, good: Sequence[tuple[ReadJob, ReadDone]]) -> None:
        self._hashes += len(good)
        for first in range(0, len(good), step := _per_task(good)):
            future = self._reader.threads.submit(self._call, good[first : first + step])
            self._hashing.add(future)
            future.add_done_callback(self._hashing.discard)

    def _call(self, good: Sequence[tuple[ReadJob, ReadDone]]) -> None:
        assert self._arrived is not None
        for job, end in good:
            if self._finished:
                return
            try:
                self._arrived(job)
            except BaseException as e:  # noqa: BLE001  # raised by the generator, whatever it is
                self._hashed.put(e)
            else:
                self._hashed.put(end)
            self.ring.wake()

    def _take(self, found: ReadDone | BaseException) -> ReadDone:
        self._hashes -= 1
        if isinstance(found, BaseException):
            raise found
        return found


def _per_task(good: Sequence[tuple[ReadJob, ReadDone]]) -> int:
    """Jobs for one task of the pool: a thread's turn costs as much as the checksum of half a MiB."""
    largest = max(end.nbytes for _, end in good)
    return max(1, (512 << 10) // largest) if len(good) > 8 else 1


def _are_one(views: Sequence[memoryview], addresses: Sequence[int]) -> bool:
    """Whether buffers are neighbours in memory too."""
    at = addresses[0]
    for view, address in zip(views, addresses, strict=True):
        if address != at:
            return False
        at += view.nbytes
    return True
