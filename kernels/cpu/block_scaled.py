"""A model of the block-scaled matrix instruction of sm_120, and of the order in which the kernels use it.

``mma.sync.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32``, A in E5M2, B in E4M3, scales in UE8M0. PTX leaves the
order and rounding of its sums open. The model is that of MMA-Sim (arXiv 2511.10909), whose authors found it to agree
with hardware: products are exact, and the 32 products and C are one sum, for which each term is cut off (toward zero)
at 25 bits below the exponent of the largest; the sum is rounded toward zero to float32. A product's exponent is the sum
of its factors' and their scales', before normalization; a zero has none.

`kernels/cuda/src/emulate.cuh` is the same model for GPUs that lack the instruction.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.formats import E4M3_VALUES, F64, U8

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

#: Bits that a term keeps below the exponent of the largest one.
FRACTION_BITS: Final = 25
BLOCK: Final = 32
#: k of the groups that the kernels divide among their warps.
GROUP: Final = 128

_NONE: Final = np.int32(-(1 << 20))  # exponent of a zero
_NAN: Final = np.uint32(0x7FFFFFFF)


def _e5m2() -> F64:
    codes = np.arange(128)
    exponent, mantissa = codes >> 2, codes & 3
    magnitudes = np.where(
        exponent == 0, np.ldexp(mantissa / 4.0, -14), np.ldexp(1.0 + mantissa / 4.0, exponent - 15)
    )
    magnitudes[124] = np.inf
    magnitudes[125:] = np.nan
    return np.concatenate([magnitudes, -magnitudes])


#: Values of the 256 bytes of float8 e5m2.
E5M2_VALUES: Final[F64] = _e5m2()


def _exponents(values: F64, mantissa_bits: int, bias: int) -> Ints:
    """Of each of 256 codes the exponent of its format, not normalized for subnormal numbers."""
    fields = (np.arange(256) & 0x7F) >> mantissa_bits
    exponents = np.where(fields == 0, 1, fields) - bias
    return np.where(values == 0, _NONE, exponents).astype(np.int32)


_E5M2_EXPONENTS: Final = _exponents(E5M2_VALUES, 2, 15)
_E4M3_EXPONENTS: Final = _exponents(E4M3_VALUES, 3, 7)


def multiply_block(c: F32, a: U8, a_scales: U8, b: U8, b_scales: U8) -> F32:
    """What the instruction returns for any number of rows and columns: c + a b, over one block of 32 k.

    Args:
        c: float32 [N, T].
        a, a_scales: uint8 [N, 32] E5M2, uint8 [N].
        b, b_scales: uint8 [T, 32] E4M3, uint8 [T].

    Returns:
        float32 [N, T]; where anything is NaN, or infinities cancel, bits 0x7FFFFFFF.
    """
    shift = a_scales.astype(np.int32)[:, None] + b_scales.astype(np.int32) - 254  # [N, T]
    with np.errstate(invalid="ignore"):
        products = E5M2_VALUES[a][:, None, :] * E4M3_VALUES[b]  # [N, T, 32], exact
    c_exponents = np.maximum(np.frexp(c)[1] - 1, -126)
    c_exponents = np.where(c == 0, _NONE, c_exponents)
    largest = (_E5M2_EXPONENTS[a][:, None, :] + _E4M3_EXPONENTS[b]).max(axis=2) + shift
    largest = np.maximum(largest, c_exponents)
    nothing = largest < _NONE // 2
    largest[nothing] = 0
    # In units of 2^(largest - FRACTION_BITS) every term is below 2^28, so that float64 holds terms and sum exactly.
    with np.errstate(invalid="ignore"):
        terms = np.trunc(np.ldexp(products, (shift - largest + FRACTION_BITS)[..., None]))
        total = terms.sum(axis=2) + np.trunc(np.ldexp(c.astype(np.float64), FRACTION_BITS - largest))
    result = toward_zero(np.ldexp(total + 0.0, largest - FRACTION_BITS))
    nan = np.isnan(total) | (a_scales == 255)[:, None] | (b_scales == 255)
    result.view(np.uint32)[nan] = _NAN
    return result


def toward_zero(values: F64) -> F32:
    """float64 to float32, rounded toward zero; from 2^128 on infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = values.astype(np.float32)
        beyond = (np.abs(nearest) > np.abs(values)) & (np.abs(values) < 2.0**128)
    result: F32 = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)
    return result


def matmul(a: U8, a_scales: U8, b: U8, b_scales: U8, *, splits: int) -> F32:
    """b times a transposed, as the kernels sum it.

    K is cut into groups of 128 (the last may be smaller), and the G groups into ``splits`` runs, of which run w has
    groups w G / splits to (w + 1) G / splits. Within a run the instruction goes through blocks of 32 in order, starting
    from zero; the runs' sums are added in order, in float32.

    Args:
        a, a_scales: uint8 [N, K] E5M2, uint8 [N, K/32].
        b, b_scales: uint8 [T, K] E4M3, uint8 [T, K/32].
        splits: how many warps share K in the kernels for few tokens; 1 for those for many.

    Returns:
        float32 [T, N].
    """
    blocks = a.shape[1] // BLOCK
    groups = (a.shape[1] + GROUP - 1) // GROUP
    per_group = GROUP // BLOCK
    total: F32 | None = None
    for run in range(splits):
        first, last = run * groups // splits, (run + 1) * groups // splits
        part = np.zeros((a.shape[0], b.shape[0]), np.float32)
        for block in range(first * per_group, min(last * per_group, blocks)):
            k = slice(block * BLOCK, (block + 1) * BLOCK)
            part = multiply_block(part, a[:, k], a_scales[:, block], b[:, k], b_scales[:, block])
        with np.errstate(invalid="ignore", over="ignore"):
            total = part if total is None else total + part
    assert total is not None
    return np.ascontiguousarray(total.T)
