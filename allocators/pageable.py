"""An arena of ordinary memory: no locked pages, so no limit but the memory itself, and no GPU can map it."""

from __future__ import annotations

import torch

from ziggurat.allocators.errors import PlaceError
from ziggurat.allocators.pages import PageRows

__all__ = ["PageableArena"]


class PageableArena:
    """A HostArena in an anonymous mapping. The places are zero at first.

    Raises GeometryError for a shape that cannot be, AllocationError if the kernel refuses the memory.
    """

    kind = "pageable"
    device_pointer: int | None = None

    def __init__(self, places: int, stride: int) -> None:
        self._rows = PageRows("host arena", places, stride)

    @property
    def places(self) -> int:
        return self._rows.rows

    @property
    def stride(self) -> int:
        return self._rows.stride

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return self._rows.tensor

    def view(self, place: int) -> memoryview:
        if not 0 <= place < self.places:
            raise PlaceError(f"place {place} is not in an arena of {self.places}")
        return self._rows.view(place)

    def close(self) -> None:
        self._rows.close()
