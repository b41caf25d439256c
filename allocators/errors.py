"""Errors of allocation and placement. Each names the limit, the numbers and what to do."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "AllocationError",
    "AllocatorError",
    "ClosedError",
    "CudaError",
    "GeometryError",
    "NumaError",
    "NumaPlacementError",
    "PageLockError",
    "PlaceError",
    "RowError",
]


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


class PageLockError(AllocatorError):
    """Memory that could not be locked and mapped. `wanted` and `locked` are bytes: of the range, and before it.

    Everything that had been locked before is unlocked again when this is raised.
    """

    def __init__(self, what: str, wanted: int, locked: int, reason: str, advice: str) -> None:
        super().__init__(f"{what}: {wanted} bytes could not be locked after {locked}: {reason}; {advice}")
        self.what, self.wanted, self.locked, self.reason, self.advice = what, wanted, locked, reason, advice

    def __reduce__(self) -> tuple[type[PageLockError], tuple[str, int, int, str, str]]:
        return (type(self), (self.what, self.wanted, self.locked, self.reason, self.advice))


class NumaError(AllocatorError):
    """A NUMA node that memory cannot be bound to, or a kernel that does not say where pages lie."""


class NumaPlacementError(NumaError):
    """Pages that lie elsewhere than on the node they were bound to.

    `pages` counts the sampled pages by node; a page that is not in memory counts under None.
    """

    def __init__(self, what: str, node: int, pages: Mapping[int | None, int]) -> None:
        self.what, self.node, self.pages = what, node, dict(pages)
        found = ", ".join(
            f"{count} not in memory" if where is None else f"{count} on node {where}"
            for where, count in sorted(self.pages.items(), key=lambda one: (one[0] is None, one[0] or 0))
        )
        super().__init__(
            f"{what}: bound to NUMA node {node}, but of {sum(self.pages.values())} sampled pages {found};"
            " free memory on that node, or set tiers.host.numa to another node or to none"
        )

    def __reduce__(self) -> tuple[type[NumaPlacementError], tuple[str, int, dict[int | None, int]]]:
        return (type(self), (self.what, self.node, self.pages))


class CudaError(AllocatorError):
    """A call of the CUDA driver that failed. `code` is its CUresult, None if there is no driver to call."""

    def __init__(self, call: str, code: int | None, text: str) -> None:
        super().__init__(f"{call}: {text}" if code is None else f"{call}: {text} (error {code})")
        self.call, self.code, self.text = call, code, text

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int | None, str]]:
        return (type(self), (self.call, self.code, self.text))
