"""Sizes of one routed expert and how tensor parallelism divides them."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.kernels.errors import CodecError


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """Sizes of one expert as ONE tensor-parallel rank holds it.

    Attributes:
        hidden: H, the model width; never divided.
        intermediate: I, the channels between the up and the down projection that this rank owns.
    """

    hidden: int
    intermediate: int

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.intermediate < 1:
            raise CodecError(
                f"expert sizes must be positive: hidden={self.hidden}, intermediate={self.intermediate}"
            )

    @property
    def w13_shape(self) -> tuple[int, int]:
        """[2I, H]: rows 0..I are the gate projection, I..2I the up projection."""
        return (2 * self.intermediate, self.hidden)

    @property
    def w2_shape(self) -> tuple[int, int]:
        """[H, I]: the down projection."""
        return (self.hidden, self.intermediate)

    def shard(self, tp_size: int) -> ExpertGeometry:
        """What each of ``tp_size`` ranks holds of an expert of this size.

        Raises:
            CodecError: the intermediate size does not divide by ``tp_size``.
        """
        if tp_size < 1:
            raise CodecError(f"tensor-parallel size must be at least 1, not {tp_size}")
        if self.intermediate % tp_size:
            raise CodecError(
                f"intermediate size {self.intermediate} does not divide by tensor-parallel size {tp_size}"
            )
        return ExpertGeometry(self.hidden, self.intermediate // tp_size)
