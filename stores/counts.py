"""What happened to the rows of a pack, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

FailedRead = Literal["io", "short", "checksum", "timeout"]
FAILED_READS: tuple[FailedRead, ...] = ("io", "short", "checksum", "timeout")
"""Why a read of a row failed: the system said no, too little arrived, other bytes than were written, or no answer."""


@dataclass(frozen=True, slots=True)
class PackCounts:
    """Since the pack was opened. A read is of one row, also where neighbours were read at once.

    read_bytes: bytes that reads brought, good or not. io, short, checksum, timeout: reads that failed, also where the
    row was got in another way afterwards. reread: rows read again, from the disk past the page cache. quarantined:
    times that a row went into quarantine. rebuilt: rows made anew from the checkpoint. mended: those of them that are
    right on the disk again.
    """

    read_bytes: int = 0
    io: int = 0
    short: int = 0
    checksum: int = 0
    timeout: int = 0
    reread: int = 0
    quarantined: int = 0
    rebuilt: int = 0
    mended: int = 0

    def since(self, before: PackCounts) -> PackCounts:
        """What came after an earlier count."""
        return PackCounts(
            *(getattr(self, one.name) - getattr(before, one.name) for one in fields(PackCounts))
        )
