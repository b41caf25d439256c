"""The host arena of an engine whose rows lie in the memory of the arena process."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from ziggurat.allocators.arena import HostArena
from ziggurat.allocators.lockers import PageLocker
from ziggurat.allocators.pages import check_geometry
from ziggurat.allocators.pinned import PinnedArena, Progress
from ziggurat.allocators.row_places import RowPlaces
from ziggurat.allocators.shared.directory import Directory
from ziggurat.allocators.shared.lease import Lease
from ziggurat.allocators.shared.messages import Attach
from ziggurat.allocators.shared.rows import SharedRows
from ziggurat.allocators.wrappers import WrappedArena

__all__ = ["ArenaShare", "Role", "SharedArena", "attach_arena"]

logger = logging.getLogger(__name__)

Role = Literal["writer", "reader", "orphan"]


class ArenaShare:
    """Which rows the shared places of an arena hold, and what this engine may do with them.

    private: places from 0 on that are this engine's alone; the places after them are shared. Tags are the caller's
    numbers of rows, 0 or more. The writer changes places; a reader looks, and nothing that it has seen published
    changes as long as it is there.
    """

    def __init__(self, lease: Lease, directory: Directory, private: int) -> None:
        self.private = private
        self.writes = lease.grant.role == "writer"
        self._lease = lease
        self._directory = directory
        self._frozen = lease.grant.frozen
        self._orphan = False
        self._guard: threading.Lock | threading.Condition = threading.Lock()
        self._lost: Callable[[], None] = lambda: None

    @property
    def role(self) -> Role:
        """What this engine is; an orphan is one whose arena process is gone."""
        if self._orphan:
            return "orphan"
        return "writer" if self.writes else "reader"

    @property
    def frozen(self) -> bool:
        """Whether published rows stay where they are; always so for a reader. See `guarded_by`."""
        return self._frozen

    @property
    def changes(self) -> int:
        """Grows whenever a row is published."""
        return self._directory.changes

    def guarded_by(self, lock: threading.Condition) -> None:
        """From here on `frozen` changes under `lock` only."""
        self._guard = lock

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Call this when the arena process is gone, in a thread; at once if it is gone already."""
        self._lost = lost
        if self._orphan:
            lost()

    def published(self) -> Iterator[tuple[int, int, int]]:
        """(place, tag, checksum) of every row that is there."""
        for place, tag, checksum in self._directory.published():
            yield self.private + place, tag, checksum

    def free(self) -> list[int]:
        """Shared places that this engine may fill."""
        return [self.private + place for place in self._directory.free()] if self.writes else []

    def fill(self, place: int) -> None:
        """Bytes are about to be written to a place without a row."""
        self._directory.fill(place - self.private)

    def publish(self, place: int, tag: int, checksum: int) -> None:
        """The whole row is there."""
        self._directory.publish(place - self.private, tag, checksum)

    def vacate(self, place: int) -> None:
        """The place holds no row any more, and nothing is being written to it."""
        self._directory.vacate(place - self.private)

    def listen(self) -> None:
        self._lease.listen(self._freeze, self._thaw, self._gone)

    def _freeze(self) -> None:
        with self._guard:
            self._frozen = True

    def _thaw(self) -> None:
        with self._guard:
            self._frozen = not self.writes

    def _gone(self) -> None:
        with self._guard:
            self._orphan = True
        logger.warning(
            "the arena process is gone; this engine goes on with the memory, and nobody takes it over"
        )
        self._lost()


class SharedArena(WrappedArena):
    """A HostArena over private and shared places, with its `share`. Closing it ends the lease."""

    def __init__(self, inner: HostArena, share: ArenaShare, lease: Lease, listing: mmap.mmap) -> None:
        super().__init__(inner)
        self._share = share
        self._lease = lease
        self._listing = listing  # kept alive by the directory's views in any case

    @property
    def share(self) -> ArenaShare:
        return self._share

    def close(self) -> None:
        super().close()
        self._lease.close()


def attach_arena(
    path: Path,
    want: Attach,
    private: int,
    *,
    locker: PageLocker | None = None,
    progress: Progress | None = None,
) -> SharedArena:
    """The arena that `want` describes, after `private` places of this process's own, from the process at `path`.

    locker: how its pages are locked, for an arena of the kind "pinned"; None locks nothing.
    progress: hears of an arena in the making, and then of its pages being locked.
    SharedArenaError if there is none to be had; GeometryError, AllocationError and PageLockError as for any arena.
    """
    check_geometry("shared arena", want.places, want.stride)
    lease = Lease.attach(path, want, progress)
    try:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if lease.grant.role == "writer" else 0)
        listing = mmap.mmap(lease.listing, 0, prot=access)
        directory = Directory(memoryview(listing), want.key, want.places, want.stride)
        rows = SharedRows(
            private,
            want.places,
            want.stride,
            lease.data,
            lease.grant.data_bytes,
            huge=lease.grant.huge,
            writable=want.writable or lease.grant.role == "writer",
        )
        inner: HostArena
        if locker is None:
            inner = Pageable(rows)
        else:
            inner = PinnedArena(
                rows.rows, rows.stride, node=want.node, locker=locker, progress=progress, memory=rows
            )
        share = ArenaShare(lease, directory, private)
        share.listen()
    except BaseException:
        lease.close()
        raise
    return SharedArena(inner, share, lease, listing)


class Pageable(RowPlaces):
    """Shared rows whose pages are not locked."""

    kind = "pageable"
    device_pointer: int | None = None
