"""Device memory through which rows flow past the pool: a few parts that are filled and computed with in turn."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.residency.ports import RowPool
from ziggurat.residency.runtime_errors import SlotError


class StagingRing:
    """Parts of equally many rows, each a RowPool of its own, so that each has its own mark for `ready`.

    Their copies should share one lane: in the order in which parts are asked for, beside the kernels. A part may be
    written again as soon as what reads it is queued, since a RowPool's copies wait for what is queued before them;
    and as nothing else is queued in between, they wait for nothing more than that.
    """

    def __init__(self, parts: Sequence[RowPool]) -> None:
        if not parts or len({(part.slots, part.stride) for part in parts}) > 1:
            raise SlotError(f"a staging ring has parts of one size, not {[part.slots for part in parts]}")
        self._parts = tuple(parts)
        self._next = 0

    @property
    def parts(self) -> int:
        """Parts, at least 1; with one, nothing is copied while something is computed."""
        return len(self._parts)

    @property
    def rows(self) -> int:
        """Rows of a part."""
        return self._parts[0].slots

    @property
    def nbytes(self) -> int:
        """Device memory of all parts."""
        return self.parts * self.rows * self._parts[0].stride

    def turn(self) -> RowPool:
        """The part whose turn it is to be filled."""
        part = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        return part

    def close(self) -> None:
        for part in self._parts:
            part.close()
