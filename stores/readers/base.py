"""What a reader of pack files is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from ziggurat.stores.readers.late import LateRead

DirectMode = Literal["auto", "always", "never"]


class ReadJob(NamedTuple):
    """Fill `buffer` (writable, contiguous, not empty) from byte `offset` on. `tag` is the caller's own.

    late: takes the buffer over if its read is given up: it may be written to until the LateRead is over, which may be
    never. Called before the job's end is yielded, or before the generator ends if it is left early. A job without it is
    waited for as long as the kernel takes.
    """

    offset: int
    buffer: memoryview
    tag: int
    late: Callable[[LateRead], None] | None = None


class ReadDone(NamedTuple):
    """How one job ended. It is good when `error` is None and `nbytes` is the buffer's length; check both.

    nbytes: bytes that arrived. seconds: time the read took from its system call on; of a read that served several jobs
    each has its share.
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

    def read(
        self, jobs: Iterable[ReadJob], arrived: Arrived | None = None, *, fresh: bool = False
    ) -> Generator[ReadDone]:
        """Run the jobs and yield each one's end in order of completion. Neighbours in the file may be one read.

        Reading starts when the generator is first advanced. All reads that were started are over when it ends,
        raises or is closed, so no buffer is written to after that, except those that were handed to their job's `late`:
        of reads that took longer than the reader's timeout, whose end is a ReadTimeoutError, or that were still under
        way a moment after the generator was left.
        `arrived(job)` is called in a thread of the reader's after a job's bytes arrived in full and before its end
        is yielded; what it raises is raised by the generator.
        fresh: read from the disk again what the page cache may hold.
        An I/O error of a job is reported in its ReadDone and does not disturb the others.
        Raises ValueError for a bad job (read-only or empty buffer, negative offset) before anything is read.
        """
        ...

    def read_ahead(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Start reading (offset, length) pieces into the page cache, without waiting; whole layers or scattered rows.

        False, and nothing happens, where reads go past the page cache: read them into memory of your own instead.
        Raises OSError for pieces that the kernel refuses.
        """
        ...

    def forget(self, offset: int, nbytes: int) -> None:
        """Let the page cache drop a piece that its reader keeps elsewhere. Safe in `arrived`.

        Nothing happens where reads go past the page cache, to pages that others use, and on a closed reader.
        """
        ...

    def close(self) -> None:
        """Wait for reads in progress, but for late ones, and let the file go. A later `read` raises ValueError.

        Idempotent."""
        ...
