"""What arenas share: rows of host memory as numbered places."""

from __future__ import annotations

import torch

from ziggurat.allocators.errors import PlaceError
from ziggurat.allocators.pages import PageRows

__all__ = ["RowPlaces"]


class RowPlaces:
    """The part of a HostArena that does not depend on how its memory is held."""

    def __init__(self, rows: PageRows) -> None:
        self._rows = rows

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
