"""A real row encoder for tests of packs: the bytes of plain float weights, sharded like any codec's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.stored import StoredExpert


class VerbatimEncoder:
    """Row = bytes of this rank's w1, w3, w2, each row-major. before: called with each tensor name first."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        name: str = "verbatim",
        version: str = "1",
        before: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._bytes = 3 * checkpoint.hidden * checkpoint.intermediate * checkpoint.dtype.itemsize
        self._before = before

    def row_bytes(self, tp_size: int) -> int:
        return self._bytes // tp_size

    def encode(self, expert: StoredExpert, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        if self._before is not None:
            self._before(expert.w1.name)
        for rank, out in outs.items():
            out.copy_(verbatim_row(expert, tp_size, rank))


def verbatim_row(expert: StoredExpert, tp_size: int, rank: int) -> torch.Tensor:
    """uint8 payload of one rank's row."""
    parts = []
    for weight, axis in ((expert.w1, 0), (expert.w3, 0), (expert.w2, 1)):
        share = weight.data.chunk(tp_size, axis)[rank]
        parts.append(share.contiguous().view(torch.uint8).flatten())
    return torch.cat(parts)
