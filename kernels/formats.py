"""The number formats of checkpoints and rows: every code's exact value, in float64.

e2m1, e4m3 and UE8M0 are those of the OCP Microscaling specification; e4m3 is the finite-only variety (448 is
the largest value, 0x7f and 0xff are NaN).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
# These say what an array holds; they do not check it, because numpy's stubs widen `uint8 >> 1` where numpy does not.
U8: TypeAlias = npt.NDArray[Any]
U16: TypeAlias = npt.NDArray[Any]
U32: TypeAlias = npt.NDArray[Any]

#: The eight magnitudes of e2m1 by code; bit 3 of a nibble is the sign.
E2M1_MAGNITUDES: Final[F64] = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
#: Halfway points between neighbours; a value on one goes to the lower neighbour.
E2M1_MIDPOINTS: Final[F64] = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
#: Values of the sixteen nibbles; code 8 is -0.0.
E2M1_VALUES: Final[F64] = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])


def _e4m3() -> F64:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    magnitudes = np.where(
        exponent == 0, np.ldexp(mantissa / 8.0, -6), np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    )
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes])


#: Values of the 256 bytes of float8 e4m3fn.
E4M3_VALUES: Final[F64] = _e4m3()

#: Values of the 256 UE8M0 bytes, 2^(byte-127); byte 0 is 2^-127, byte 255 is NaN.
E8M0_VALUES: Final[F64] = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)


def float32_bits(half: U16) -> U32:
    """Float32 bit patterns uint32 of float16 bit patterns uint16; infinity and NaN stay what they are.

    Shifted into place, a float16 means 2^-112 of its value as a float32, subnormal numbers too. numpy's own conversion
    goes one by one.
    """
    wide = half.astype(np.uint32)
    sign = (wide & 0x8000) << 16
    wide &= 0x7FFF
    not_finite = wide >= 0x7C00
    wide <<= 13
    floats = wide.view(np.float32)
    floats *= np.float32(2.0**112)
    if not_finite.any():
        wide[not_finite] |= 0x7F800000
    wide |= sign
    return wide
