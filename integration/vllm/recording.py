"""Routing of a running engine, written to a trace file while it serves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.placement import Placement
from ziggurat.residency.simulation.errors import TraceError
from ziggurat.residency.simulation.recorder import RoutingRecorder

logger = logging.getLogger("vllm.ziggurat")

_FIRST_SAVE = 4096  # tokens


class RoutingRecording:
    """Keeps `folder/routing.npz` up to date: written whenever twice as many tokens are known, and at the end.

    A disk that refuses is logged, and ends the recording; it never ends a step.
    """

    def __init__(self, folder: Path, geometry: ServiceGeometry, place: Placement, model: str) -> None:
        self.path = folder / "routing.npz"
        self._metadata: dict[str, Any] = {"model": model, "source": "ziggurat"}
        self._next_save = _FIRST_SAVE
        rows = place.max_tokens if place.on_gpu else 0
        self._recorder: RoutingRecorder | None = RoutingRecorder(
            geometry, max_tokens=rows, device=place.device
        )

    def layer(self, layer: int, topk_ids: torch.Tensor) -> None:
        """A layer is called with ids [T, k]."""
        if self._recorder is not None:
            self._recorder.layer(layer, topk_ids)

    def step(self, tokens: StepTokens) -> None:
        """A step has returned."""
        if self._recorder is None:
            return
        self._recorder.step(tokens)
        if self._recorder.tokens >= self._next_save:
            self._next_save = 2 * self._recorder.tokens
            self._save()

    def close(self) -> None:
        """Write what there is. May be called twice."""
        self._save()
        self._recorder = None

    def _save(self) -> None:
        if self._recorder is None:
            return
        try:
            self._recorder.save(self.path, self._metadata)
        except TraceError as error:
            logger.warning("routing is no longer recorded: %s", error)
            self._recorder = None
