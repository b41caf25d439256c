"""How much staging memory prompts get, and in how many parts."""

from __future__ import annotations

from dataclasses import dataclass

#: Parts of a ring. While one is read by kernels, the others hide what the link would wait for between layers.
PARTS = 4
#: Rows of the smallest ring: one arrives while another is computed with.
LEAST_ROWS = 2
#: What `auto` takes: four parts of 96 MiB, each of which is under way for 1.8 ms on a link of 55 GB/s, far longer than
#: the launches that compute with it.
AUTO_BYTES = 384 << 20
#: … and at most this part of the device's memory.
AUTO_SHARE = 16


@dataclass(frozen=True, slots=True)
class RingShape:
    """A ring of `parts` parts of `rows` rows each."""

    parts: int
    rows: int

    @property
    def total(self) -> int:
        """Rows of all parts."""
        return self.parts * self.rows


def ring_of(rows: int, experts: int) -> RingShape:
    """The ring that `rows` rows (at least 2) are best used for. A part has no use for more rows than a layer has."""
    parts = PARTS if rows >= PARTS * PARTS else LEAST_ROWS
    return RingShape(parts, min(experts, rows // parts))


def auto_rows(stride: int, memory: int | None) -> int:
    """Rows of a ring that nobody gave a size, on a device with `memory` bytes to spend; None: not known."""
    spend = AUTO_BYTES if memory is None else min(AUTO_BYTES, memory // AUTO_SHARE)
    return max(LEAST_ROWS, spend // stride)
