"""Weights as fields of wide integers, for quantizing with few, long tensor operations on any device.

A weight sits in a *lane*, one byte (e4m3 bytes, e2m1 codes) or 16 bits (bfloat16), its sign in the lane's top bit and
a number that orders like its magnitude below. 16 bytes of consecutive weights are a *unit*; a block of 32 weights has 2
or 4 units. Tensors are "unit-major", [units, blocks * lanes of a unit], blocks counted along K and then by row: a
reduction over a block begins along the long axis, and one number for a block spreads over its weights by copying 16
bytes.

Only integer operations are used (and, or, shifts, sums, differences, maximum, comparisons, look-ups in tables that are
made on the host), each of which PyTorch computes exactly on every device: no floating-point number is made, rounded or
divided there. No operation reads or writes across lanes: a difference of two magnitudes fits a signed lane, and every
shift is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

BLOCK: Final = 32
UNIT_BYTES: Final = 16
#: 16 bytes that move as one; complex numbers are copied, never computed with.
UNIT: Final = torch.complex128


def repeated(value: int, width: int) -> int:
    """A field of `width` bits repeated over 64 bits, as the signed number that PyTorch wants."""
    wide = sum(value << shift for shift in range(0, 64, width))
    return wide - (1 << 64) if wide >> 63 else wide


def width_of(lanes: torch.Tensor) -> int:
    """Bits of a lane."""
    return 8 * lanes.element_size()


def unit_major(parts: Sequence[torch.Tensor], lane: torch.dtype) -> torch.Tensor:
    """Lanes [units, blocks * lanes of a unit] of matrices whose weights are one lane each.

    parts: contiguous, K a multiple of 32. The result is a copy.
    """
    units = BLOCK * lane.itemsize // UNIT_BYTES
    views = [_units(part).view(-1, units) for part in parts]
    out = torch.empty(units, sum(len(view) for view in views), dtype=UNIT, device=parts[0].device)
    begin = 0
    for view in views:
        end = begin + len(view)
        for unit in range(units):
            out[unit, begin:end].copy_(view[:, unit])
        begin = end
    return out.view(lane)


def _units(part: torch.Tensor) -> torch.Tensor:
    flat = part.view(-1)
    if flat.storage_offset() * flat.element_size() % UNIT_BYTES:
        flat = flat.clone()
    return flat.view(UNIT)


def nibble_lanes(pairs: torch.Tensor) -> torch.Tensor:
    """e2m1 codes int8 [..., 2 n] of packed pairs uint8 [..., n], the sign in the top bit: lanes in order of k."""
    spread = pairs.to(torch.int16)
    spread |= spread << 4
    signs = spread & 0x0808
    signs <<= 4
    spread &= 0x0707
    spread |= signs
    return spread.view(torch.int8)


def magnitudes(lanes: torch.Tensor) -> torch.Tensor:
    """The lanes without their signs."""
    wide = lanes.view(torch.int64)
    return (wide & repeated((1 << (width_of(lanes) - 1)) - 1, width_of(lanes))).view(lanes.dtype)


def block_max(lanes: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block, int32 [blocks]."""
    return unit_max(lanes.amax(0, keepdim=True))[0]


def unit_max(lanes: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each unit: int32 [units, blocks]."""
    halves = lanes.view(torch.int64).view(len(lanes), -1, 2)
    largest = torch.maximum(*(half.contiguous().view(lanes.dtype) for half in halves.unbind(-1)))
    shift = 32
    while shift >= width_of(lanes):
        largest = torch.maximum(largest, (largest.view(torch.int64) >> shift).view(lanes.dtype))
        shift //= 2
    return (largest.view(torch.int64) & ((1 << width_of(lanes)) - 1)).to(torch.int32)


@lru_cache(maxsize=8)
def byte_units(device: torch.device) -> torch.Tensor:
    """Units that hold one byte value in all lanes, by the value: complex128 [256]."""
    values = torch.arange(256, dtype=torch.uint8)
    return values[:, None].expand(256, UNIT_BYTES).contiguous().view(UNIT)[:, 0].to(device)


def select(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[index] of a one-dimensional table and an int32 index of any shape."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def signs_of(lanes: torch.Tensor) -> torch.Tensor:
    """int64 view of the sign bits alone."""
    return lanes.view(torch.int64) & repeated(1 << (width_of(lanes) - 1), width_of(lanes))


def zero_lanes(of_magnitudes: torch.Tensor) -> torch.Tensor:
    """int64 with the top bit of every lane whose magnitude is 0."""
    return signs_of(of_magnitudes - 1)


def count_signs(wide: torch.Tensor, width: int, tensors: int) -> torch.Tensor:
    """How many lanes of each tensor have their sign bit set: int64 [tensors] of int64 [units, tensors * n]."""
    ones = (wide >> (width - 1)) & repeated(1, width)
    by_unit = ones[0]
    for unit in ones[1:]:
        by_unit = by_unit + unit
    fields = by_unit.view(torch.int8 if width == 8 else torch.int16)
    return fields.view(tensors, -1).sum(-1, dtype=torch.int64)


def alternate(signs: torch.Tensor, zeros: torch.Tensor, width: int) -> None:
    """Give exact zeros the sign of their k's parity. signs, zeros: int64, sign bits of lanes; signs is changed."""
    odd = repeated(1 << (2 * width - 1), 2 * width)
    signs &= ~zeros
    signs |= zeros & odd
