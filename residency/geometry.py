"""The sizes of the model a service works for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceGeometry:
    """layers: MoE layers, numbered 0..layers-1; `layer_ids` are the model's own numbers, for messages.

    experts: routed experts per layer. top_k: choices per token. intermediate: channels that this rank holds.
    clamp: SwiGLU clamp of the model, None for none.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    layer_ids: tuple[int, ...]
    clamp: float | None = None

    @property
    def rows(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    def key(self, layer: int, expert: int) -> int:
        """Row key of (layer index, expert)."""
        return layer * self.experts + expert

    def split(self, key: int) -> tuple[int, int]:
        """(layer index, expert) of a row key."""
        return divmod(key, self.experts)
