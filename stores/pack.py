"""Reading rows out of a pack file."""

from __future__ import annotations

from typing import NamedTuple

from ziggurat.stores.errors import RowReadError


class RowRequest(NamedTuple):
    """Read row (layer, expert) into `buffer`: writable, at least `stride` bytes. `layer` is a layer index."""

    layer: int
    expert: int
    buffer: memoryview


class RowResult(NamedTuple):
    """How one request ended; the buffer's content is the row only if `error` is None.

    seconds: time in the reading thread(s), both reads if the row was read again.
    """

    layer: int
    expert: int
    nbytes: int
    seconds: float
    error: RowReadError | None
