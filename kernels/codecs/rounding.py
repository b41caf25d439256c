"""Source weights to the nearest bfloat16, ties to even, always in one rounding from the exact number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ziggurat.kernels.errors import WeightRangeError
from ziggurat.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, F64, U16, U32, float32_bits
from ziggurat.kernels.sources import SourceArrays

_INFINITY = 0x7F80


def bf16_rows(source: SourceArrays, start: int, stop: int) -> U16:
    """Bits uint16 [stop - start, K] of rows start..stop.

    Raises:
        NonFiniteWeightError: an element is NaN or infinite.
        WeightRangeError: a number rounds to infinity.
    """
    if source.format == "bf16":
        bits = source.bits[start:stop]
    elif source.format in ("f16", "f32"):
        bits = _from_float32(_float32_bits(source, start, stop))
    elif source.format == "fp8_block":
        bits = _from_fp8(source, start, stop)
    else:
        bits = _from_pairs(source, start, stop)
    # As signed numbers the positive ones that are not finite are the largest, as unsigned ones the negative ones.
    if bits.view(np.int16).max() >= _INFINITY or bits.max() >= 0x8000 | _INFINITY:
        source.values(start, stop)  # raises if the checkpoint's own number is not finite
        raise WeightRangeError(source.name, "a weight is beyond bfloat16's range; check the tensor's scales")
    return bits


def bf16_bits(values: F64) -> U16:
    """Bits of the nearest bfloat16 of float64 numbers; infinity where it overflows, NaN for NaN."""
    bits = np.abs(values).view(np.uint64)
    kept = 52 - 7
    rounded = (bits + ((1 << (kept - 1)) - 1) + ((bits >> kept) & 1)) >> kept
    nearest = np.clip(rounded.astype(np.int64) - ((1023 - 127) << 7), 0, _INFINITY)
    small = np.abs(values) < 2.0**-126
    if small.any():
        nearest[small] = np.rint(np.ldexp(np.abs(values[small]), 133)).astype(np.int64)
    nearest[np.isnan(values)] = _INFINITY | 1
    sign = np.signbit(values).astype(np.uint16) << 15
    return nearest.astype(np.uint16) | sign


def _float32_bits(source: SourceArrays, start: int, stop: int) -> U32:
    bits = source.bits[start:stop]
    return bits if source.format == "f32" else float32_bits(bits)


def _from_float32(bits: U32) -> U16:
    """Add just under half of the last kept place, or half if that place is odd; a carry into the exponent is right."""
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    nan = (bits & 0x7FFFFFFF) > 0x7F800000  # the sum would carry it past the sign
    rounded += np.where(nan, 0, bits) if nan.any() else bits
    rounded >>= 16
    if nan.any():
        rounded[nan] = _INFINITY | 1
    return rounded.astype(np.uint16)


def _from_fp8(source: SourceArrays, start: int, stop: int) -> U16:
    """By a table of the 256 bytes under each scale of these rows."""
    bn, bk = source.block
    first_band = start // bn
    bands = np.ascontiguousarray(source.scales[first_band : (stop - 1) // bn + 1])
    patterns, which = np.unique(
        bands.view(np.int64), return_inverse=True
    )  # as numbers, -0 and 0 would be one
    table = bf16_bits(E4M3_VALUES * patterns.view(np.float64)[:, None]).ravel()
    index = np.repeat(which.reshape(-1, source.scales.shape[1]) << 8, bk, axis=1)[:, : source.cols]
    places = index[np.arange(start, stop) // bn - first_band] + source.bits[start:stop]
    nearest: U16 = table.take(places, mode="clip")
    return nearest


def _from_pairs(source: SourceArrays, start: int, stop: int) -> U16:
    """By a table of the 256 pairs under each of 256 scale bytes."""
    table = _pair_table(source.format, source.global_scale)
    pairs = source.bits[start:stop].reshape(-1, source.block[1] // 2)
    places = (source.scale_bits[start:stop].astype(np.uint16) << 8).reshape(-1, 1) + pairs
    return table.take(places, mode="clip").view(np.uint16).reshape(stop - start, source.cols)


@lru_cache(maxsize=8)
def _pair_table(format: str, global_scale: float) -> U32:
    scales = E4M3_VALUES * global_scale if format == "nvfp4" else E8M0_VALUES
    single = bf16_bits(E2M1_VALUES * scales[:, None])
    pairs = np.arange(256)
    return np.stack([single[:, pairs & 15], single[:, pairs >> 4]], axis=-1).view(np.uint32).ravel()
