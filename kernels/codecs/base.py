"""What a codec is: the bytes of one expert at one precision, written from a checkpoint and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.sources import SourceWeight


class ExpertSource(Protocol):
    """One whole expert as a checkpoint stores it: w1 = gate [I, H], w3 = up [I, H], w2 = down [H, I]."""

    @property
    def w1(self) -> SourceWeight: ...

    @property
    def w3(self) -> SourceWeight: ...

    @property
    def w2(self) -> SourceWeight: ...


@dataclass(frozen=True, slots=True)
class Section:
    """A named byte range of a row."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DecodedExpert:
    """The numbers a row stands for, as one rank holds them.

    Attributes:
        w13: float32 [2I, H]; rows 0..I are the gate projection, I..2I the up projection.
        w2: float32 [H, I].
    """

    w13: torch.Tensor
    w2: torch.Tensor


class Codec(Protocol):
    """How a row encodes an expert.

    Attributes:
        name: what configurations and packs call it.
        version: names the quantizer and the row layout; it changes whenever the bytes for the same
            weights would change. Packs record it, and a pack of another version is refused.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def check(self, geometry: ExpertGeometry) -> None:
        """Raise CodecError naming the size that the layout cannot hold and the multiple it needs."""
        ...

    def row_bytes(self, geometry: ExpertGeometry) -> int:
        """Payload bytes of one row, without padding."""
        ...

    def sections(self, geometry: ExpertGeometry) -> tuple[Section, ...]:
        """The parts of a row in order; together they cover it without gaps."""
        ...

    def encode(self, expert: ExpertSource, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        """Write the rows of some ranks of one whole expert.

        Args:
            expert: the whole expert; its matrices must agree in size.
            tp_size: how many ranks share it.
            outs: rank -> contiguous CPU uint8 tensor [row_bytes(rank's geometry)] to fill.

        A rank's codes and scales are exactly the whole expert's: nothing is decided per slice.

        Raises:
            CodecError: sizes that do not fit, a wrong buffer, a weight out of range.
            NonFiniteWeightError: NaN or infinity; the contents of ``outs`` are then undefined.
        """
        ...

    def decode(self, row: torch.Tensor, geometry: ExpertGeometry) -> DecodedExpert:
        """The numbers of a row: uint8, at least ``row_bytes`` long, at any alignment."""
        ...
