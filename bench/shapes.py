"""Sizes of the Mixture-of-Experts models that the benchmarks are run at."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The routed experts of one model. layers: MoE layers. hidden, intermediate: of one expert."""

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def rows(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    @property
    def weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate

    def flop(self, tokens: int) -> int:
        """Floating-point operations of one layer: a multiplication and an addition for each weight and pair."""
        return 2 * tokens * self.top_k * self.weights

    def with_layers(self, layers: int) -> MoeShape:
        return replace(self, layers=layers)


SHAPES = {
    shape.name: shape
    for shape in (
        MoeShape("deepseek-v4-flash", 43, 256, 6, 4096, 2048),
        MoeShape("glm-5.2", 75, 256, 8, 6144, 2048),
        MoeShape("demo", 6, 32, 4, 256, 128),
    )
}
"""By the name that command lines take."""
