"""Activations as MXFP8, bit for bit what the kernels for block-scaled matrix instructions make of them.

OCP Microscaling Formats v1.0: 32 numbers along K share the power of two 2^(floor(log2(largest)) - 8), 8 being the
exponent of E4M3's largest numbers; elements are rounded to the nearest E4M3, ties to even, and saturate at 448.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.formats import E4M3_VALUES, E8M0_VALUES, F64, U8

BLOCK: Final = 32
_E4M3_MAX_EXPONENT: Final = 8
_NAN_SCALE: Final = 255
#: Between each two neighbours among E4M3's 127 magnitudes.
_MIDPOINTS: Final[F64] = (E4M3_VALUES[:126] + E4M3_VALUES[1:127]) / 2

F32 = npt.NDArray[np.float32]


def quantize_mxfp8(x: F32) -> tuple[U8, U8]:
    """Quantize float32 [..., K], K a multiple of 32.

    Returns:
        codes uint8 [..., K] (E4M3) and scales uint8 [..., K/32] (UE8M0: 2^(byte - 127)). A block whose exponent would
        lie below the smallest scale, such as one of zeros, has scale byte 0. One with infinity or NaN has scale byte
        255, which is NaN, so that everything it enters is NaN.
    """
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    # Bits of magnitudes order as the magnitudes do, and NaN comes above all.
    exponents = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=-1).astype(np.int32) >> 23
    scales = np.maximum(exponents - _E4M3_MAX_EXPONENT, 0)
    scales[exponents == 255] = _NAN_SCALE
    shift = np.where(scales == _NAN_SCALE, 0, 127 - scales)
    codes = e4m3_codes(np.ldexp(blocks.astype(np.float64), shift[..., None]))
    return codes.reshape(x.shape), scales.astype(np.uint8)


def e4m3_codes(values: F64) -> U8:
    """E4M3 codes uint8 of float64 numbers: nearest, ties to even, saturating at 448 (infinity too); NaN is 0x7F."""
    magnitudes = np.abs(values)
    lower = np.searchsorted(_MIDPOINTS, magnitudes, "left")
    upper = np.searchsorted(_MIDPOINTS, magnitudes, "right")
    codes = lower + (lower & (upper - lower))  # the two differ on a midpoint only; then the even one
    codes[np.isnan(values)] = 0x7F
    signs: U8 = np.signbit(values).astype(np.uint8) << 7
    return signs | codes.astype(np.uint8)


def dequantize_mxfp8(codes: U8, scales: U8) -> F64:
    """float64 [..., K] of what quantize_mxfp8 returns."""
    factors = E8M0_VALUES[scales]
    values: F64 = E4M3_VALUES[codes].reshape(*scales.shape, BLOCK) * factors[..., None]
    return values.reshape(codes.shape)
