"""From missed rows to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INLINE_OVERHEAD: Final = 1.08
"""A step that serves its own misses took this much more than computing and copying together (H200, docs/benchmarks)."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """row_bytes: of one row. link_gb_per_s: host to device, 10^9 bytes. resident_ms: a step without misses."""

    row_bytes: int
    link_gb_per_s: float
    resident_ms: float = 0.0

    def milliseconds(self, rows: float) -> float:
        """Predicted time of a step that brings so many rows."""
        if rows == 0.0:
            return self.resident_ms
        return INLINE_OVERHEAD * (self.resident_ms + rows * self.row_bytes / self.link_gb_per_s / 1e6)
