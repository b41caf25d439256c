"""The seam between packs and codecs: the builder is given an encoder and knows nothing else of codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from ziggurat.stores.stored import StoredExpert


class RowEncoder(Protocol):
    """Turns one stored expert into rows. Called from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def row_bytes(self, tp_size: int) -> int:
        """Payload of one rank's row, not padded."""
        ...

    def encode(self, expert: StoredExpert, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        """Fill `outs[rank]` (uint8 `[row_bytes(tp_size)]`) for each rank asked for."""
        ...


@runtime_checkable
class BatchRowEncoder(RowEncoder, Protocol):
    """An encoder that would rather have several experts at a time."""

    def encode_many(
        self, experts: Sequence[StoredExpert], tp_size: int, outs: Mapping[int, torch.Tensor]
    ) -> None:
        """Fill `outs[rank]` (uint8 `[experts, row_bytes(tp_size)]`, each row contiguous) for each rank asked for."""
        ...
