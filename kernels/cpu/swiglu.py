"""SwiGLU and the weighted sum of experts as the CUDA kernels compute them, to the bit.

Every step is one float32 operation that IEEE 754 defines, in the kernels' order (`swiglu` and `exp_plain` in
kernels/cuda/src/common.cuh, `combine_token` in combine.cuh), so that a CPU gets the same bits.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def exp_plain(v: F32) -> F32:
    """exp(v) of v cut to [-87, 88], NaN being -87; by the polynomial of Cephes' expf, without fused operations."""
    f = np.float32
    v = np.minimum(np.where(np.isnan(v), f(-87), np.maximum(v, f(-87))), f(88)).astype(np.float32)
    shifter = f(12582912)  # 1.5 * 2^23: adding it rounds to an integer
    n = (v * f(1.44269504) + shifter) - shifter
    r = v - n * f(0.693359375)
    r = r + n * f(2.12194440e-4)
    p = np.full_like(r, f(1.9875691500e-4))
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f(coefficient)
    p = ((p * r) * r + r) + f(1)
    power: F32 = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    result: F32 = p * power
    return result


def swiglu(gate: F32, up: F32, limit: float | None) -> F32:
    """silu(gate) * up, with gate at most ``limit`` and up within plus and minus it."""
    bound = np.float32(math.inf if limit is None else limit)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        gate = np.where(gate > bound, bound, gate)
        up = np.where(up > bound, bound, np.where(up < -bound, -bound, up))
        silu = gate / (np.float32(1) + exp_plain(-gate))
        result: F32 = silu * up
    return result


def weighted_sum(partials: F32, weights: F32, present: npt.NDArray[np.bool_]) -> F32:
    """Fused multiply-adds from zero in the order j = 0..k-1, leaving out what is not present.

    Args:
        partials: float32 [T, k, H]. weights: float32 [T, k]. present: bool [T, k].

    Returns:
        float32 [T, H].
    """
    total = np.zeros((partials.shape[0], partials.shape[2]), np.float32)
    for j in range(partials.shape[1]):
        new = fused_multiply_add(weights[:, j, None], partials[:, j], total)
        total = np.where(present[:, j, None], new, total)
    return total


def fused_multiply_add(a: F32, b: F32, c: F32) -> F32:
    """a * b + c, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there, which keeps what the rounding to float32
    needs to know about the bits that float64 loses.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c.astype(np.float64), product.shape)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        total = product + addend
        other = total - product
        error = (product - (total - other)) + (addend - other)  # of the sum, exactly
        even = (total.view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        result: F32 = np.where((error != 0) & even & np.isfinite(total), odd, total).astype(np.float32)
    return result
