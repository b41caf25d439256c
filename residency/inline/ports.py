"""What computes a layer without touching slots: for prompts, and where rows have to come from the disk at once."""

from __future__ import annotations

from typing import Protocol

import torch

from ziggurat.residency.passes import PassState, StepTokens
from ziggurat.residency.slots import IntArray32


class StreamedLayers(Protocol):
    """Layers of an eager pass. Resident experts are used where they are; all others come through staging memory.

    Whoever runs the pass puts the number of live tokens into the device's state.
    """

    def begin(self, table: IntArray32, tokens: StepTokens, epoch: int) -> None:
        """Before the pass. table int32 [L, E]: slots, which stay as they are until `end`. epoch: of the step."""
        ...

    def run(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H] in x's dtype; exact. Puts routes, counts and failed reads into
        `state`."""
        ...

    def end(self) -> None:
        """After the pass, or one that raised."""
        ...
