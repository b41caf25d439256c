"""What a host cache writes down about an arena that outlives it, and what it finds there when it begins.

The arena process knows places, tags and checksums; this knows that a tag is the key of a row of one pack, and which
bytes that row has. A row that is found is believed if the pack has it with the same checksum and, unless nothing is to
be verified, if its bytes have that checksum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Condition
from typing import Literal

from ziggurat.allocators.shared.arena import ArenaShare, Role
from ziggurat.residency.ports import RowArena, RowPack
from ziggurat.stores.packformat import PackHeader, row_digest

logger = logging.getLogger(__name__)

_MOST_THREADS = 16


def arena_key(header: PackHeader) -> str:
    """64 hex digits for the rows of this pack: of this checkpoint, codec, geometry and rank, and of no other."""
    return hashlib.sha256(json.dumps(asdict(header), sort_keys=True).encode()).hexdigest()


def arena_label(header: PackHeader) -> str:
    """The same for people, at most 200 characters."""
    name = f"{header.codec} {header.identity[:12]} rank {header.tp_rank} of {header.tp_size}"
    return name[:200]


def open_ledger(
    arena: RowArena, pack: RowPack, verify: Literal["always", "first-read", "never"]
) -> Ledger | None:
    """The ledger of an arena that is shared; None for any other."""
    share: ArenaShare | None = getattr(arena, "share", None)
    return None if share is None else Ledger(share, pack, arena, verify)


class Ledger:
    """The rows in the shared places of `arena`. The writer's part is called under the cache's lock.

    verify: as `tiers.disk.verify`; anything but "never" has `news` check the bytes of rows that were there before.
    """

    def __init__(
        self,
        share: ArenaShare,
        pack: RowPack,
        arena: RowArena,
        verify: Literal["always", "first-read", "never"] = "first-read",
    ) -> None:
        self._share = share
        self._arena = arena
        self._rows = pack.header.layers * pack.header.experts
        self._verify = verify != "never"
        checksums = getattr(pack, "checksums", None)
        self._checksums: list[int] | None = None if checksums is None else checksums.reshape(-1).tolist()
        self._known: set[int] = set()  # places whose row has been looked at
        self._changes = -1

    @property
    def private(self) -> int:
        """Places from 0 on that nobody shares: for reads that are not kept."""
        return self._share.private

    @property
    def frozen(self) -> bool:
        """Whether no row may be evicted, since somebody else reads it where it is."""
        return self._share.frozen

    @property
    def role(self) -> Role:
        return self._share.role

    def guarded_by(self, lock: Condition) -> None:
        """`frozen` changes under this lock from here on."""
        self._share.guarded_by(lock)

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Call this, in a thread, when the arena process is gone."""
        self._share.when_lost(lost)

    def free(self) -> list[int]:
        """Shared places that may be filled; none for a reader."""
        return self._share.free()

    def fill(self, place: int) -> None:
        """A read into the place begins."""
        self._share.fill(place)

    def publish(self, place: int, key: int) -> None:
        """The row of `key` is there, verified."""
        self._known.add(place)
        self._share.publish(place, key, self._checksum(key, place))

    def vacate(self, place: int) -> None:
        """The place holds no row any more."""
        self._share.vacate(place)

    def news(self) -> dict[int, int]:
        """key -> place of rows that were published since the last call, by whomever but this ledger."""
        changes = self._share.changes
        if changes == self._changes:
            return {}
        first, self._changes = self._changes < 0, changes
        found: dict[int, int] = {}
        strays: list[int] = []
        for place, key, checksum in self._share.published():
            if place not in self._known:
                self._known.add(place)
                if key < self._rows and key not in found and self._agrees(key, checksum):
                    found[key] = place
                else:
                    strays.append(place)
        # Those that come later were verified by the writer that is at work now.
        if first and self._verify and found:
            strays += self._damaged(found)
        if strays:
            logger.warning(
                "%d rows of the shared arena are not those of the pack; they are left out", len(strays)
            )
        for place in strays:
            if self._share.writes and not self.frozen:
                self.vacate(place)
        gone = set(strays)
        return {key: place for key, place in found.items() if place not in gone}

    def _agrees(self, key: int, checksum: int) -> bool:
        return self._checksums is None or self._checksums[key] == checksum

    def _checksum(self, key: int, place: int) -> int:
        return self._digest(place) if self._checksums is None else self._checksums[key]

    def _digest(self, place: int) -> int:
        return row_digest(self._arena.view(place))

    def _damaged(self, found: dict[int, int]) -> list[int]:
        """Places whose bytes do not have the checksum that is written down for them."""
        wanted = {place: checksum for place, _, checksum in self._share.published()}
        places = list(found.values())
        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
            digests = threads.map(self._digest, places)
            return [
                place for place, digest in zip(places, digests, strict=True) if digest != wanted.get(place)
            ]
