"""Records where a running service sends its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.simulation.errors import TraceError
from ziggurat.residency.simulation.trace import Trace, make_trace, write_trace

MOST_TOKENS: Final = 200_000  # about as many as fit 100 MB for 43 layers of six choices


class RoutingRecorder:
    """Told of every call of a layer and of the end of every step, it keeps the steps' routing, that of the pass whose
    result the step returned.

    max_tokens: rows of the largest batch; then all copies go to one buffer on `device`, also in captured graphs. 0: the
    buffer grows, which a graph must not see. most_tokens: after so many tokens no further step is recorded.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        *,
        max_tokens: int = 0,
        device: torch.device | None = None,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self.tokens = 0
        self.full = False
        self._geometry = geometry
        self._most = most_tokens
        self._grows = max_tokens == 0
        self._ids = self._buffer(max_tokens, device or torch.device("cpu"))
        self._steps: list[npt.NDArray[np.int32]] = []
        self._prefill: list[npt.NDArray[np.bool_]] = []

    def _buffer(self, rows: int, device: torch.device) -> torch.Tensor:
        g = self._geometry
        return torch.zeros((g.layers, rows, g.top_k), dtype=torch.int32, device=device)

    def layer(self, layer: int, topk_ids: torch.Tensor) -> None:
        """A layer (index) is called with ids [T, k]."""
        rows = topk_ids.shape[0]
        if self._grows and rows > self._ids.shape[1]:
            wider = self._buffer(rows, self._ids.device)
            wider[:, : self._ids.shape[1]] = self._ids
            self._ids = wider
        self._ids[layer, :rows].copy_(topk_ids)

    def step(self, tokens: StepTokens) -> None:
        """The step has returned. Waits for the device."""
        if self.full or not tokens.count:
            return
        if self.tokens + tokens.count > self._most:
            self.full = True
            return
        self._steps.append(self._ids[:, : tokens.count].transpose(0, 1).cpu().numpy().copy())
        none = np.zeros(tokens.count, dtype=np.bool_)
        self._prefill.append(none if tokens.prefill is None else tokens.prefill.copy())
        self.tokens += tokens.count

    def trace(self, metadata: Mapping[str, Any] | None = None, name: str = "recorded") -> Trace:
        """What was recorded so far. TraceError if that is nothing."""
        if not self._steps:
            raise TraceError("no step was recorded")
        sizes = [len(step) for step in self._steps]
        layers = list(self._geometry.layer_ids) or list(range(self._geometry.layers))
        return make_trace(
            np.concatenate(self._steps)[None],
            experts=self._geometry.experts,
            batches=np.concatenate(([0], np.cumsum(sizes))),
            prefill=np.concatenate(self._prefill),
            metadata={"layers": layers, "order": "steps of a run", **(metadata or {})},
            name=name,
        )

    def save(self, path: Path, metadata: Mapping[str, Any] | None = None) -> bool:
        """Write what was recorded so far; False, and no file, if that is nothing. TraceError if the disk refuses."""
        if not self._steps:
            return False
        write_trace(path, self.trace(metadata, path.name))
        return True
