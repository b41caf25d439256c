"""The two sets of values that tiled codecs round to, with everything a quantizer needs to know about one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ziggurat.kernels.codecs.quantize import Ints, fp4_blocks, fp4_exponents, w2_blocks, w2_exponents
from ziggurat.kernels.formats import E2M1_MAGNITUDES, E2M1_MIDPOINTS, F64, U8


@dataclass(frozen=True)
class Grid:
    """Values a code can stand for, in units of its block's scale.

    A code is ``sign << sign_bit | number of midpoints strictly below |w| / scale``.

    Attributes:
        midpoints: ascending; a magnitude on one belongs below it.
        magnitudes: by code without sign.
        sign_bit: position of the sign in a code; as far from the magnitude as it is in (2-bit) all or (e2m1) half of
            the registers of a lane word, where then one shift puts both in place.
        words: 32-bit words for a lane's sixteen weights.
        has_zero: whether a code stands for zero; where none does, a zero's sign decides its value.
        exact_steps: which of the magnitudes below a power of two the block of that largest magnitude may hold to
            be exact, counted down in half binades: 4, 3, 2, 1.5, 1, (0.75), 0.5 are 0 to 6.
        exponents: float64 [..., 32] -> the scale exponents int32 [...] of the rules.
        blocks: float64 [..., 32], alternate_zeros -> codes uint8 [..., 32] and scale bytes uint8 [...].
    """

    midpoints: tuple[float, ...]
    magnitudes: F64
    sign_bit: int
    words: int
    has_zero: bool
    exact_steps: tuple[int, ...]
    exponents: Callable[[F64], Ints]
    blocks: Callable[[F64, bool], tuple[U8, U8]]

    def values(self, codes: U8) -> F64:
        """float64 of codes of any shape, in units of the scale."""
        magnitudes = self.magnitudes[codes & ((1 << self.sign_bit) - 1)]
        return np.where(codes >> self.sign_bit, -magnitudes, magnitudes)


W2_GRID: Final = Grid(
    midpoints=(2.5,),
    magnitudes=np.array([1.0, 4.0]),
    sign_bit=4,
    words=1,
    has_zero=False,
    exact_steps=(0, 4),
    exponents=w2_exponents,
    blocks=w2_blocks,
)

FP4_GRID: Final = Grid(
    midpoints=tuple(float(m) for m in E2M1_MIDPOINTS),
    magnitudes=E2M1_MAGNITUDES,
    sign_bit=6,
    words=2,
    has_zero=True,
    exact_steps=(0, 1, 2, 3, 4, 6),
    exponents=fp4_exponents,
    blocks=lambda blocks, alternate_zeros: fp4_blocks(blocks),
)
