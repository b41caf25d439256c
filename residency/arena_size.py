"""How large an arena is that nobody gave a size: every row that fits, with head-room for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ziggurat.residency.sizes import format_bytes

_LEAST, _MOST = 256 << 20, 10 << 30


def auto_headroom(available: int) -> int:
    """Bytes of `available` host memory that an arena of size `auto` leaves: an eighth, 256 MiB to 10 GiB.

    More than the reserve of sizes that were written down, since what an engine still allocates (pinned buffers,
    processes of its own) is known to whoever writes one.
    """
    return min(max(available // 8, _LEAST), _MOST)


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves to an arena. nbytes: at most so many. limit: its name. left: what it leaves, for people."""

    nbytes: int
    limit: str
    left: str


def memory_rooms(
    limits: Iterable[tuple[str, int | None]], *, ranks: int, pool_bytes: int, on_cpu: bool
) -> list[Room]:
    """Room under limits of host memory (name, available bytes), which all ranks share.

    pool_bytes: of this rank, in the same memory if on_cpu; then the KV cache is in it, too, and gets half of the rest.
    """
    found = []
    for name, available in limits:
        if available is None:
            continue
        kept = auto_headroom(available)
        room = max(0, available - kept) // ranks
        left = f"{format_bytes(kept)} of {format_bytes(available)} are left to everything else"
        if on_cpu:
            room = max(0, room - pool_bytes) // 2
            left += ", and half of what pool and arena could share to the KV cache"
        found.append(Room(room, name, left))
    return found


def describe(rows: int, total: int, stride: int, tightest: Room | None, *, inline: bool) -> str:
    """One line for a plan. inline: a GPU may read the arena by itself."""
    amount = "every row" if rows == total else f"{rows} of {total} rows"
    text = f"tiers.host.size: auto takes {amount}, {format_bytes(rows * stride)}"
    if tightest is not None:
        bound = "" if rows == total else f"; {tightest.limit} has no room for more"
        text += f"{bound}; {tightest.left}"
    if inline and rows < total:
        text += "; a step that needs one of the others waits for the disk and runs again"
    return text
