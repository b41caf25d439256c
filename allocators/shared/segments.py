"""The arenas that a keeper holds: their memory, who writes, who reads, and what becomes of them in the end."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ziggurat.allocators.errors import AllocatorError
from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.shared import memory
from ziggurat.allocators.shared.directory import Directory, directory_bytes
from ziggurat.allocators.shared.errors import ArenaRefusedError
from ziggurat.allocators.shared.messages import ArenaStatus, Attach, Grant, Status

__all__ = ["Holder", "Segments"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_SIGN_OF_LIFE = 5.0  # seconds between two words to somebody who waits for others' arenas
_PATIENCE = 10.0  # seconds in which a writer says that it evicts nothing any more


class Holder(Protocol):
    """An engine at the other end of a connection."""

    pid: int

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Send a message without waiting; False if it cannot be sent."""


@dataclass(eq=False)
class _Segment:
    """frozen: the number of the freeze that the writer was told, 0 for none. answered: the one that it has answered."""

    want: Attach
    data: int
    listing: int
    memory: mmap.mmap
    view: memoryview
    directory: Directory
    data_bytes: int
    huge: bool
    used: int = 0
    writer: Holder | None = None
    readers: set[Holder] = field(default_factory=set)
    frozen: int = 0
    answered: int = 0

    @property
    def idle(self) -> bool:
        return self.writer is None and not self.readers

    def close(self) -> None:
        self.directory.release()
        self.view.release()
        self.memory.close()
        os.close(self.data)
        os.close(self.listing)


class Segments:
    """Safe for a thread for each connection. Nothing is asked of holders that are gone, and nothing waits for ever.

    limit: bytes of all arenas together. huge: of reserved huge pages where there are enough. allocatable: bytes that
    this process could take now, None if that is not known. reserve: bytes to leave of so many.
    """

    def __init__(
        self,
        limit: int,
        *,
        huge: bool = False,
        allocatable: Callable[[], int | None] = lambda: HostLimits.read().allocatable,
        reserve: Callable[[int], int] = lambda have: min(max(have // 10, 256 << 20), 4 << 30),
        patience: float = _PATIENCE,
    ) -> None:
        self.limit = limit
        self._huge = huge
        self._allocatable, self._reserve, self._patience = allocatable, reserve, patience
        self._attaching = threading.Lock()  # one at a time: making an arena may take a while
        self._changed = threading.Condition()
        self._segments: dict[str, _Segment] = {}
        self._ending = False
        self._numbers = itertools.count(1)

    def attach(self, want: Attach, holder: Holder, progress: Progress) -> tuple[Grant, tuple[int, int]]:
        """A place at the arena of this key for `holder`, as its writer if it has none; made if it is not there.

        The descriptors of directory and rows are the caller's. ArenaRefusedError, and AllocatorError where memory is
        made. Afterwards the holder must `leave`, also if this raises. progress: called with the bytes that are ready,
        0 while others have to be waited for, and those of the whole arena.
        """
        while not self._attaching.acquire(timeout=_SIGN_OF_LIFE):
            progress(0, want.nbytes)
        try:
            segment = self._find(want) or self._make(want, progress)
            with self._changed:
                if self._ending:
                    raise ArenaRefusedError("the arena process is ending")
                segment.used = next(self._numbers)
                if segment.writer is None or self._read(segment, holder):
                    return self._grant_writer(segment, want, holder)
            grant = Grant("reader", True, segment.data_bytes, segment.huge)
            return self._grant(segment, grant, want.writable)
        finally:
            self._attaching.release()

    def _find(self, want: Attach) -> _Segment | None:
        with self._changed:
            segment = self._segments.get(want.key)
            if segment is None or (segment.want.places, segment.want.stride) == (want.places, want.stride):
                return segment
            if not segment.idle:
                raise ArenaRefusedError(
                    f"{want.label} is in use with {segment.want.places} places of {segment.want.stride} bytes, not "
                    f"{want.places} of {want.stride}"
                )
            self._drop(segment, f"it is wanted with {want.places} places now")
        return None

    def _make(self, want: Attach, progress: Progress) -> _Segment:
        self._make_room(want)
        huge = self._fits_huge(want)
        if self._huge and not huge:
            free = memory.free_huge_bytes(want.node)
            logger.warning("%s: %d bytes of huge pages are free, too few, so ordinary ones", want.label, free)
        try:
            data_bytes = memory.file_bytes(want.nbytes, huge)
            data = memory.make_file("ziggurat-arena", data_bytes, huge=huge)
        except OSError as error:
            if not huge:
                raise ArenaRefusedError(f"{want.nbytes} bytes refused: {error.strerror}") from error
            logger.warning("%s: no huge pages (%s), so ordinary ones", want.label, error.strerror)
            huge, data_bytes = False, memory.file_bytes(want.nbytes, False)
            data = memory.make_file("ziggurat-arena", data_bytes)
        try:
            whole = want.nbytes
            memory.touch(
                "shared arena", data, data_bytes, want.node, lambda ready: progress(min(ready, whole), whole)
            )
            listing = memory.make_file("ziggurat-arena-directory", directory_bytes(want.places))
        except BaseException:
            os.close(data)
            raise
        mapping = mmap.mmap(listing, 0)
        view = memoryview(mapping)
        directory = Directory.create(view, want.key, want.places, want.stride)
        segment = _Segment(want, data, listing, mapping, view, directory, data_bytes, huge)
        with self._changed:
            self._segments[want.key] = segment
        logger.info("%s: an arena of %d places, %d bytes", want.label, want.places, want.nbytes)
        return segment

    def _fits_huge(self, want: Attach) -> bool:
        """Whether there are huge pages for it; on its node, since one that lacks them does not get others'."""
        needed = memory.file_bytes(want.nbytes, True)
        nodes = {None, want.node}
        return self._huge and all(memory.free_huge_bytes(node) >= needed for node in nodes)

    def _make_room(self, want: Attach) -> None:
        """Drop arenas that nobody uses, those that were not used for longest first, until this one has room."""
        while True:
            with self._changed:
                taken = sum(one.data_bytes for one in self._segments.values())
                have = self._allocatable()
                room = self.limit - taken
                if have is not None and not self._fits_huge(want):  # reserved pages are not in it
                    room = min(room, have - self._reserve(have))
                if want.nbytes <= room:
                    return
                idle = [one for one in self._segments.values() if one.idle]
                if not idle:
                    raise ArenaRefusedError(
                        f"{want.label}: {want.nbytes} bytes wanted, {max(0, room)} are left to the arena process; "
                        "lower tiers.host.size or raise its --limit"
                    )
                self._drop(min(idle, key=lambda one: one.used), f"{want.label} needs its memory")

    def _drop(self, segment: _Segment, why: str) -> None:
        logger.info("%s: dropped with %d rows: %s", segment.want.label, segment.directory.count(), why)
        del self._segments[segment.want.key]
        segment.close()

    # -- roles; all under `_changed` ---------------------------------------------------------------------------

    def _read(self, segment: _Segment, holder: Holder) -> bool:
        """Make the holder a reader once the writer evicts nothing any more; True if there is no writer after all."""
        segment.readers.add(holder)
        if not segment.frozen:
            segment.frozen = next(self._numbers)
            writer = segment.writer
            if writer is not None and not writer.tell({"op": "freeze", "number": segment.frozen}):
                segment.frozen = 0
        wanted = segment.frozen  # 0: it is on its way out, or very busy
        done = self._changed.wait_for(
            lambda: segment.writer is None or segment.answered >= wanted > 0 or self._ending, self._patience
        )
        if segment.writer is None:
            segment.readers.discard(holder)
            return True
        if not done or self._ending:
            self._end_reading(segment, holder)
            raise ArenaRefusedError(
                f"{segment.want.label}: its writer, process {segment.writer.pid}, does not answer"
            )
        return False

    def _grant_writer(self, segment: _Segment, want: Attach, holder: Holder) -> tuple[Grant, tuple[int, int]]:
        if segment.idle:
            self._recycle(segment)
        segment.writer = holder
        frozen = bool(segment.readers)
        segment.frozen = segment.answered = next(self._numbers) if frozen else 0
        return self._grant(segment, Grant("writer", frozen, segment.data_bytes, segment.huge), True)

    def _grant(self, segment: _Segment, grant: Grant, writable: bool) -> tuple[Grant, tuple[int, int]]:
        listing = os.dup(segment.listing) if grant.role == "writer" else memory.read_only(segment.listing)
        try:
            data = os.dup(segment.data) if writable else memory.read_only(segment.data)
        except BaseException:
            os.close(listing)
            raise
        return grant, (listing, data)

    def frozen(self, holder: Holder, number: int) -> None:
        """A writer says that it has seen a freeze."""
        with self._changed:
            for segment in self._segments.values():
                if segment.writer is holder:
                    segment.answered = max(segment.answered, number)
            self._changed.notify_all()

    def leave(self, holder: Holder) -> None:
        """A holder is gone. What it was filling is lost until nobody is left who may have it mapped."""
        with self._changed:
            for segment in self._segments.values() if not self._ending else ():
                if segment.writer is holder:
                    segment.writer, segment.frozen, segment.answered = None, 0, 0
                    lost = segment.directory.abandon()
                    logger.info("%s: its writer has left, %d places lost", segment.want.label, lost)
                if holder in segment.readers:
                    self._end_reading(segment, holder)
                if segment.idle:
                    self._recycle(segment)
            self._changed.notify_all()

    def _end_reading(self, segment: _Segment, holder: Holder) -> None:
        segment.readers.discard(holder)
        if not segment.readers and segment.writer is not None and segment.frozen and not self._ending:
            segment.frozen = segment.answered = 0
            segment.writer.tell({"op": "thaw"})  # one that does not listen stays frozen, which is no harm

    def _recycle(self, segment: _Segment) -> None:
        """Nobody has the memory mapped: give lost places other pages."""
        stride = segment.want.stride
        for place in segment.directory.lost():
            if memory.renew(segment.data, place * stride, stride):
                segment.directory.vacate(place)

    # -- for people --------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """What is held."""
        with self._changed:
            arenas = tuple(
                ArenaStatus(
                    one.want.key,
                    one.want.label,
                    one.want.places,
                    one.want.stride,
                    one.data_bytes,
                    one.huge,
                    one.directory.count(),
                    len(one.directory.lost()),
                    None if one.writer is None else one.writer.pid,
                    tuple(sorted(reader.pid for reader in one.readers)),
                )
                for one in self._segments.values()
            )
            huge_pages = memory.free_huge_bytes(None) if self._huge else 0
            return Status(os.getpid(), self.limit, self._allocatable(), arenas, huge_pages)

    def end(self) -> None:
        """From here on holders leave because we do, and go on: nobody may evict what others read."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all memory; engines that have it mapped keep it."""
        with self._changed:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()


REFUSALS: tuple[type[Exception], ...] = (AllocatorError, OSError)
"""What `attach` may raise."""
