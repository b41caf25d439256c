"""How jobs become system calls: sorted by offset, neighbours in the file merged, bytes under way bounded."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from ziggurat.stores.readers.base import ReadDone, ReadJob
from ziggurat.stores.readers.files import address_of, is_aligned
from ziggurat.stores.readers.late import LateRead, ReadTimeoutError

MAX_MERGED_BYTES = 8 << 20  # beyond this a larger read is no faster, and its first row comes later
MIN_MERGED_BYTES = 512 << 10  # below this a read costs more than the disk's share of it
MAX_PIECES = 512  # of one vectored read; the kernel's limit is 1024
# Of one `read`: far more than any disk needs to be busy, and a bound on what is lost when a batch is abandoned.
MAX_INFLIGHT_BYTES = 128 << 20


@dataclass(slots=True, eq=False)
class Operation:
    """Jobs that are neighbours in the file, as one read; `done` of its `nbytes` have arrived.

    views: the jobs' buffers as bytes. aligned: fit for direct I/O. fresh: the bytes must come from the disk.
    """

    offset: int
    jobs: list[ReadJob]
    views: list[memoryview]
    addresses: list[int]
    nbytes: int
    aligned: bool
    fresh: bool = False
    done: int = 0
    seconds: float = 0.0

    def rest(self) -> tuple[list[memoryview], list[int]]:
        """Buffers that are still to be filled, and their addresses."""
        if not self.done:
            return self.views, self.addresses
        skip = self.done
        for i, view in enumerate(self.views):
            if skip < view.nbytes:
                return [view[skip:], *self.views[i + 1 :]], [
                    self.addresses[i] + skip,
                    *self.addresses[i + 1 :],
                ]
            skip -= view.nbytes
        return [], []

    def ends(self) -> list[ReadDone]:
        """The jobs' ends, all of whose bytes arrived; time is shared out by bytes."""
        if len(self.jobs) == 1:
            return [ReadDone(self.jobs[0].tag, self.nbytes, self.seconds, None)]
        return [
            ReadDone(job.tag, view.nbytes, self.seconds * view.nbytes / self.nbytes, None)
            for job, view in zip(self.jobs, self.views, strict=True)
        ]

    def failed(self, error: OSError) -> tuple[list[ReadDone], list[ReadJob], list[Operation]]:
        """What an error makes of it: ends, the jobs among them whose bytes arrived, and reads to try alone.

        An error is one job's alone: of a merged read the jobs that had arrived are good, the others are read singly.
        """
        if len(self.jobs) == 1:
            return [ReadDone(self.jobs[0].tag, self.done, self.seconds, error)], [], []
        ends, arrived, again = [], [], []
        at = 0
        for job, view, address in zip(self.jobs, self.views, self.addresses, strict=True):
            at += view.nbytes
            if at <= self.done:
                ends.append(ReadDone(job.tag, view.nbytes, self.seconds * view.nbytes / self.nbytes, None))
                arrived.append(job)
            else:
                single = Operation(
                    job.offset, [job], [view], [address], view.nbytes, self.aligned, self.fresh
                )
                again.append(single)
        return ends, arrived, again

    def timed_out(self, path: Path, seconds: float, *, begun: bool = True) -> list[ReadDone]:
        """The ends of jobs whose read is given up, or not begun for want of hope."""
        return [
            ReadDone(
                job.tag,
                0,
                seconds / len(self.jobs),
                ReadTimeoutError(path, job.offset, view.nbytes, seconds, begun=begun),
            )
            for job, view in zip(self.jobs, self.views, strict=True)
        ]

    @property
    def can_be_late(self) -> bool:
        """Whether it may be given up: somebody takes over every buffer."""
        return all(job.late is not None for job in self.jobs)

    def hand_over(self, late: LateRead) -> None:
        """Tell the jobs that their buffers may be written to until `late` is over."""
        for job in self.jobs:
            if job.late is not None:
                job.late(late)

    def file_end(self) -> OSError:
        """The error of a read that found the end of the file."""
        return OSError(errno.EIO, f"the file ends after {self.done} of {self.nbytes} bytes at {self.offset}")


def merge_limit(jobs: Sequence[ReadJob], width: int) -> int:
    """Bytes up to which neighbours become one read: so that `width` reads can run side by side, twice."""
    total = sum(job.buffer.nbytes for job in jobs)
    return max(MIN_MERGED_BYTES, min(MAX_MERGED_BYTES, total // (2 * width)))


def plan_operations(jobs: Iterable[ReadJob], limit: int, *, fresh: bool = False) -> Iterator[Operation]:
    """Operations in order of offset, neighbours merged up to `limit` bytes. Made one by one, while others run."""
    last: Operation | None = None
    for job in sorted(jobs, key=_offset):
        buffer = job.buffer
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        nbytes, address = view.nbytes, address_of(view)
        aligned = is_aligned(job.offset, nbytes, address)
        if (
            last is not None
            and last.offset + last.nbytes == job.offset
            and last.aligned == aligned
            and last.nbytes + nbytes <= limit
            and len(last.jobs) < MAX_PIECES
        ):
            last.jobs.append(job)
            last.views.append(view)
            last.addresses.append(address)
            last.nbytes += nbytes
        else:
            if last is not None:
                yield last
            last = Operation(job.offset, [job], [view], [address], nbytes, aligned, fresh)
    if last is not None:
        yield last


class Queue:
    """Operations that are still to run; those that are to be tried again come first. Safe for several threads."""

    def __init__(self, operations: Iterator[Operation]) -> None:
        self._operations = operations
        self._again: deque[Operation] = deque()
        self._lock = Lock()

    def take(self) -> Operation | None:
        """The next one, or None if there is none now."""
        with self._lock:
            return self._again.popleft() if self._again else next(self._operations, None)

    def put_back(self, operations: Iterable[Operation]) -> None:
        self._again.extendleft(operations)

    def clear(self) -> None:
        with self._lock:
            self._operations = iter(())
            self._again.clear()


def _offset(job: ReadJob) -> int:
    return job.offset
