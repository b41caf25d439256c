"""An arena of ordinary memory: no locked pages, so no limit but the memory itself, and no GPU can map it."""

from __future__ import annotations

from ziggurat.allocators.pages import PageRows
from ziggurat.allocators.row_places import RowPlaces

__all__ = ["PageableArena"]


class PageableArena(RowPlaces):
    """A HostArena in an anonymous mapping. The places are zero at first.

    Raises GeometryError for a shape that cannot be, AllocationError if the kernel refuses the memory.
    """

    kind = "pageable"
    device_pointer: int | None = None

    def __init__(self, places: int, stride: int) -> None:
        super().__init__(PageRows("host arena", places, stride))
