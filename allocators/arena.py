"""What a host arena is: places for rows in host memory, which readers fill and pools are filled from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["HostArena", "MakeArena"]


class HostArena(Protocol):
    """A fixed number of equal places in host memory. Which row is in which place is the caller's business.

    A place starts on a 4 KiB boundary and `stride` is a multiple of 4 KiB, so that a direct read can fill it.
    Different places may be read and written from different threads at once.
    """

    @property
    def kind(self) -> str:
        """How the memory is held: "pageable", "pinned"."""

    @property
    def places(self) -> int:
        """Number of places, at least 1."""

    @property
    def stride(self) -> int:
        """Bytes of a place, a multiple of 4096."""

    @property
    def nbytes(self) -> int:
        """`places * stride`."""

    @property
    def tensor(self) -> torch.Tensor:
        """All places: u8 `[places, stride]` on the host, the same memory as the views. ClosedError once closed."""

    @property
    def device_pointer(self) -> int | None:
        """Address of place 0 for kernels, `stride` bytes a place; None if devices cannot read this memory."""

    def view(self, place: int) -> memoryview:
        """The writable bytes of one place. PlaceError if there is no such place, ClosedError once closed."""

    def close(self) -> None:
        """Gives the memory back once no view of it is left. Closing twice does nothing."""


MakeArena = Callable[[int, int], HostArena]
"""Makes an arena of so many places of so many bytes: what arenas are wrapped by, since they allocate when made."""
