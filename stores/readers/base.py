"""What a reader of pack files is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Literal, NamedTuple, Protocol

DirectMode = Literal["auto", "always", "never"]


class ReadJob(NamedTuple):
    """Fill `buffer` (writable, contiguous, not empty) from byte `offset` on. `tag` is the caller's own."""

    offset: int
    buffer: memoryview
    tag: int


class ReadDone(NamedTuple):
    """How one job ended. It is good when `error` is None and `nbytes` is the buffer's length; check both.

    nbytes: bytes that arrived. seconds: time the read took in its thread, without queueing.
    """

    tag: int
    nbytes: int
    seconds: float
    error: OSError | None


Arrived = Callable[[ReadJob], None]


class Reader(Protocol):
    """Reads pieces of one file straight into the caller's memory. Safe for concurrent callers."""

    @property
    def name(self) -> str: ...

    @property
    def direct(self) -> bool:
        """True when reads go past the page cache."""
        ...

    def read(self, jobs: Iterable[ReadJob], arrived: Arrived | None = None) -> Generator[ReadDone]:
        """Run the jobs and yield each one's end in order of completion.

        Reading starts when the generator is first advanced. All reads that were started are over when it ends,
        raises or is closed, so no buffer is written to after that.
        `arrived(job)` is called in the reading thread after a job's bytes arrived in full and before its end
        is yielded; what it raises is raised by the generator.
        An I/O error of a job is reported in its ReadDone and does not disturb the others.
        Raises ValueError for a bad job (read-only or empty buffer, negative offset) before anything is read.
        """
        ...

    def close(self) -> None:
        """Wait for reads in progress and let the file go. A later `read` raises ValueError. Idempotent."""
        ...
