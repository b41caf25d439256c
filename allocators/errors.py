"""Errors of allocation and placement. Each names the limit, the numbers and what to do."""

from __future__ import annotations

__all__ = ["AllocationError", "AllocatorError", "ClosedError", "GeometryError", "PlaceError", "RowError"]


class AllocatorError(Exception):
    """Base of every error this package raises on purpose."""


class AllocationError(AllocatorError):
    """The machine did not give the memory. `wanted` and `have` are bytes; `have` is None where it is not known."""

    def __init__(self, what: str, limit: str, wanted: int, have: int | None, advice: str) -> None:
        known = "" if have is None else f", {have} bytes are left"
        super().__init__(f"{what}: {wanted} bytes refused by {limit}{known}; {advice}")
        self.what, self.limit, self.wanted, self.have, self.advice = what, limit, wanted, have, advice

    def __reduce__(self) -> tuple[type[AllocationError], tuple[str, str, int, int | None, str]]:
        return (type(self), (self.what, self.limit, self.wanted, self.have, self.advice))


class GeometryError(AllocatorError, ValueError):
    """A number of rows or a stride that no arena or pool can have."""


class PlaceError(AllocatorError, IndexError):
    """A place or slot that does not exist, or one named twice in a call that fills each once."""


class RowError(AllocatorError, ValueError):
    """A row that cannot be written: not one-dimensional u8 on the host, empty, or longer than the stride."""


class ClosedError(AllocatorError):
    """An arena or pool was used after `close()`."""
