"""What the tensor quantizer knows of each source format: a block's scale byte and its thresholds.

A group is the same matrix (w1, w3 or w2) of several experts; a piece is some rows of one of them, or all rows of
several. Tables are made on the host by the float64 rules of quantize.py, so that what is left for the device is integer
arithmetic and look-ups. floats.py, fp8.py, nvfp4.py and mxfp4.py say why that gives the bytes of the rules, and for
which tensors; the others are "odd" and left to those modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import torch

from ziggurat.kernels.codecs import lanes
from ziggurat.kernels.codecs.exact import RISKY_SCALE_BYTE
from ziggurat.kernels.codecs.fp8 import exact_bytes, is_fast_fp8
from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.lanes import BLOCK, select
from ziggurat.kernels.codecs.nvfp4 import half_tables, is_fast_nvfp4
from ziggurat.kernels.codecs.quantize import BIG_CODE, rule_exponents
from ziggurat.kernels.formats import E4M3_VALUES
from ziggurat.kernels.sources import SourceArrays, SourceWeight

_NAN: Final = 0x7F


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows, quantized but for the signs of zeros.

    Attributes:
        lanes, magnitudes: int8 or int16 [units, blocks * lanes of a unit], with signs and without; see lanes.py.
        codes: the codes without signs, likewise: the number of the grid's midpoints below each magnitude.
        scale_bytes: uint8 [blocks].
        odd: bool [tensors]: the tensor needs the float64 path, or a refusal.
    """

    lanes: torch.Tensor
    magnitudes: torch.Tensor
    codes: torch.Tensor
    scale_bytes: torch.Tensor
    odd: torch.Tensor


class Group(Protocol):
    """The same matrix of several experts.

    Attributes:
        odd: tensors that no piece must be taken of.
        has_zero_mode: whether the signs of exact zeros are decided for a tensor as a whole.
    """

    @property
    def odd(self) -> Sequence[bool]: ...

    @property
    def has_zero_mode(self) -> bool: ...

    def piece(self, tensors: slice, rows: slice) -> Piece: ...


def open_group(
    sources: Sequence[SourceArrays], weights: Sequence[SourceWeight], grid: Grid, device: torch.device
) -> Group | None:
    """The group of matrices of one format and shape; None where no fast path knows the format."""
    data = [weight.data.contiguous().to(device, non_blocking=True) for weight in weights]
    match sources[0].format:
        case "bf16":
            return _Bf16Group(data, grid)
        case "fp8_block":
            return _Fp8Group(sources, data, grid)
        case "nvfp4":
            return _Nvfp4Group(sources, data, grid)
        case "mxfp4":
            return _Mxfp4Group(sources, data, grid)
    return None


# --- bfloat16 ---------------------------------------------------------------------------------------------------------

_MANTISSA: Final = 7
_INFINITY: Final = 0x7F80
_LEAST_AMAX: Final = (127 - 40) << _MANTISSA
#: Smallest mantissa field whose fraction exceeds 6 / 2^2.5 - 1.
_FIRST_UP: Final = int((6 / 2**2.5 - 1) * (1 << _MANTISSA)) + 1
_HALF_BINADE: Final = 1 << (_MANTISSA - 1)


def _bf16_pattern(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


@lru_cache(maxsize=8)
def _bf16_units(value: float, device: torch.device) -> torch.Tensor:
    """Units of the patterns of value * 2^(byte - 127), by scale byte: complex128 [256]."""
    patterns = (torch.arange(256) << _MANTISSA) + (_bf16_pattern(value) - _bf16_pattern(1.0))
    patterns[0] = _bf16_pattern(value)  # for blocks of zeros, which are above nothing
    lane = patterns.clamp(0, _INFINITY).to(torch.int16)
    return lane[:, None].expand(256, 8).contiguous().view(lanes.UNIT)[:, 0].to(device)


class _Bf16Group:
    has_zero_mode = True

    def __init__(self, data: list[torch.Tensor], grid: Grid) -> None:
        self.odd = [False] * len(data)
        self._data, self._grid, self._device = data, grid, data[0].device

    def piece(self, tensors: slice, rows: slice) -> Piece:
        bits = lanes.unit_major([one[rows] for one in self._data[tensors]], torch.int16)
        magnitudes = lanes.magnitudes(bits)
        amax = lanes.block_max(magnitudes)
        by_tensor = amax.view(tensors.stop - tensors.start, -1)
        smallest = ((by_tensor - 1) & 0x7FFF).amin(-1)  # that is not 0
        odd = (smallest < _LEAST_AMAX - 1) | (by_tensor.amax(-1) >= _INFINITY)
        # A block of zeros comes to byte 0.
        scale_bytes = ((amax - (_FIRST_UP + (2 << _MANTISSA))) >> _MANTISSA).clamp_(0, 255)
        self._keep_exact(scale_bytes, magnitudes, amax)
        return Piece(bits, magnitudes, self._codes(magnitudes, scale_bytes), scale_bytes.to(torch.uint8), odd)

    def _codes(self, magnitudes: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
        """Distances of patterns are the same under every scale: the midpoints' above 1 are half a binade apart."""
        if not self._grid.has_zero:
            limits = select(_bf16_units(2.5, self._device), scale_bytes).view(torch.int16)
            above = (limits - magnitudes).view(torch.int64) >> 15
            above &= lanes.repeated(1, 16)
            return above.view(torch.int16)
        ones = select(_bf16_units(1.0, self._device), scale_bytes).view(torch.int16)
        beyond = magnitudes - ones
        codes = beyond + (_HALF_BINADE // 2 - 1)  # 1.25 is a quarter of a binade above 1
        codes >>= _MANTISSA - 1
        codes.clamp_(0, 5)
        for midpoint in (0.25, 0.75):
            limit = _bf16_pattern(midpoint) - _bf16_pattern(1.0)
            above = torch.rsub(beyond, limit)
            above >>= 15
            codes -= above  # minus minus one
        return codes

    def _keep_exact(self, scale_bytes: torch.Tensor, magnitudes: torch.Tensor, amax: torch.Tensor) -> None:
        """Raise the scale byte of blocks that the grid holds exactly; their amax is a power of two."""
        where = ((amax & ((1 << _MANTISSA) - 1)) == 0).nonzero().view(-1)
        by_block = magnitudes.view(len(magnitudes), len(amax), -1)
        if where.numel():  # whole half binades below it, which the first unit denies almost always
            first = by_block[0].index_select(0, where) & (_HALF_BINADE - 1)
            where = where[(first == 0).all(-1)]
        if not where.numel():
            return
        chosen = by_block.index_select(1, where)
        largest = amax.index_select(0, where).to(torch.int16)
        below = largest[:, None] - chosen
        fits = chosen == 0 if self._grid.has_zero else torch.zeros_like(chosen, dtype=torch.bool)
        for step in self._grid.exact_steps:
            fits |= below == step * _HALF_BINADE
        scale_bytes[where[fits.all(-1).all(0) & (largest != 0)]] += 1


# --- FP8 with a scale for a block -------------------------------------------------------------------------------------

_MOST: Final = 126  # the largest magnitude byte


@lru_cache(maxsize=8)
def _e4m3_steps(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """By magnitude byte, int32 [128]: which of 16 small bytes has its mantissa, and how many binades lie between."""
    byte = torch.arange(128, dtype=torch.int32)
    small = torch.where(byte < 16, byte, 8 + (byte & 7))
    return small.to(device), ((byte >> 3) - 1).clamp(0).to(device)


class _Fp8Group:
    """Tables by scale: S scales of all tensors of the group follow each other."""

    has_zero_mode = True

    def __init__(self, sources: Sequence[SourceArrays], data: list[torch.Tensor], grid: Grid) -> None:
        self.odd = [not is_fast_fp8(source) for source in sources]
        self._grid, self._device = grid, data[0].device
        self._data = [one.view(torch.int8) for one in data]
        first = sources[0]
        self._block, self._width = first.block, first.scales.shape[1]
        self._scales_each = first.scales.size
        scales = np.concatenate(
            [
                np.ones(first.scales.size) if odd else s.scales.ravel()
                for s, odd in zip(sources, self.odd, strict=True)
            ]
        )
        exponents = rule_exponents(E4M3_VALUES[:16] * scales[:, None])
        exponents[:, 0] = exponents[
            :, 1
        ]  # a block of zeros gets the thresholds of a small one: none is above any
        self._low = int(exponents.min())
        self._steps = int(exponents.max()) + 15 - self._low + 2
        self._exponents = torch.from_numpy(exponents.ravel() - self._low).to(self._device)
        self._powers: torch.Tensor | None = None
        powers = np.frexp(scales)[0] == 0.5
        if powers.any():
            self._powers = torch.from_numpy(powers).to(self._device)
            self._exact = torch.from_numpy(exact_bytes(tuple(grid.magnitudes))).to(self._device)
        self._limits = self._limit_table(scales)

    def _limit_table(self, scales: np.ndarray[tuple[int], np.dtype[np.float64]]) -> torch.Tensor:
        """The largest byte up to midpoint * 2^exponent / scale: int32 [midpoints, S * steps].

        At exponent 0 that quotient is (8 + f + less than 1) / 16 * 2^E: byte 8 (E + 6) + f, if it were normal. Its byte
        rises by 8 with each exponent; below 8 numbers are subnormal, where it is (8 + f) shifted down.
        """
        mantissa, exponent = np.frexp(np.array(self._grid.midpoints)[:, None] / scales)
        fraction = np.floor((2 * mantissa - 1) * 8).astype(np.int32)
        at_zero = torch.from_numpy(((exponent.astype(np.int32) + 6) << 3) + fraction).to(self._device)
        steps = torch.arange(self._low, self._low + self._steps, dtype=torch.int32, device=self._device)
        normal = at_zero[..., None] + (steps << 3)
        subnormal = (8 + (normal & 7)) >> (1 - (normal >> 3)).clamp(0, 31)
        chosen: torch.Tensor = torch.where(normal >= 8, normal, subnormal)
        return chosen.clamp(0, _MOST).view(len(at_zero), -1)

    def _scale_index(self, tensors: slice, rows: slice, k_blocks: int) -> torch.Tensor:
        """Which scale each block has: int32 [blocks]."""
        bn, bk = self._block
        row = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=self._device) // bn * self._width
        column = torch.arange(k_blocks, dtype=torch.int32, device=self._device) * BLOCK // bk
        tensor = torch.arange(tensors.start, tensors.stop, dtype=torch.int32, device=self._device)
        index: torch.Tensor = tensor[:, None, None] * self._scales_each + row[:, None] + column
        return index.view(-1)

    def piece(self, tensors: slice, rows: slice) -> Piece:
        bits = lanes.unit_major([one[rows] for one in self._data[tensors]], torch.int8)
        magnitudes = lanes.magnitudes(bits)
        amax = lanes.block_max(magnitudes)
        odd = amax.view(tensors.stop - tensors.start, -1).amax(-1) == _NAN
        scale = self._scale_index(tensors, rows, self._data[0].shape[1] // BLOCK)
        small, binades = (select(table, amax) for table in _e4m3_steps(self._device))
        exponents = select(self._exponents, (scale << 4) + small) + binades
        if self._powers is not None:
            self._keep_exact(exponents, magnitudes, amax, select(self._powers, scale))
        index = scale * self._steps + exponents
        codes = _count_above(magnitudes, [select(table, index)[None] for table in self._limits])
        scale_bytes = exponents + (self._low + 127)
        scale_bytes *= amax.clamp(max=1)  # 0 for a block of zeros
        return Piece(bits, magnitudes, codes, scale_bytes.to(torch.uint8), odd)

    def _keep_exact(
        self, exponents: torch.Tensor, magnitudes: torch.Tensor, amax: torch.Tensor, powers: torch.Tensor
    ) -> None:
        """Raise the exponent of blocks that the grid holds exactly; their largest weight is a power of two."""
        normal_power = (amax >= 8) & ((amax & 7) == 0)
        where = (powers & (normal_power | (amax == 1) | (amax == 2) | (amax == 4))).nonzero().view(-1)
        by_block = magnitudes.view(len(magnitudes), len(amax), -1)
        for units in (by_block[:1], by_block[1:]):
            if not where.numel():
                return
            pair = (amax.index_select(0, where) << 7)[:, None] + units.index_select(1, where)
            where = where[select(self._exact, pair).all(-1).all(0)]
        exponents[where] += 1


# --- packed e2m1 ------------------------------------------------------------------------------------------------------


def _to(
    device: torch.device, arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays).astype(np.int32)).to(device)


class _Nvfp4Group:
    """Tables by tensor, since each has its own global scale; a half of a block is a unit."""

    has_zero_mode = True

    def __init__(self, sources: Sequence[SourceArrays], data: list[torch.Tensor], grid: Grid) -> None:
        self._grid, self._device, self._data = grid, data[0].device, data
        self._scales = [torch.from_numpy(source.scale_bits).to(self._device) for source in sources]
        self.odd = [not is_fast_nvfp4(source) for source in sources]
        tables = [
            half_tables(1 / 3 if odd else source.global_scale, grid.words)
            for source, odd in zip(sources, self.odd, strict=True)
        ]
        # A largest weight that is a power of two may make a block exact, which only the float64 path looks into.
        self.odd = [odd or bool(t.powers.any()) for odd, t in zip(self.odd, tables, strict=True)]
        self._exponents = _to(self._device, [t.exponents for t in tables]).view(-1)
        self._scale_bytes = _to(self._device, [t.scale_bytes for t in tables]).view(-1)
        limits = _to(self._device, [t.thresholds & 0xFF for t in tables])
        self._limits = limits.transpose(0, 1).reshape(limits.shape[1], -1)

    def piece(self, tensors: slice, rows: slice) -> Piece:
        count = tensors.stop - tensors.start
        nibbles = [lanes.nibble_lanes(one[rows]) for one in self._data[tensors]]
        bits = lanes.unit_major(nibbles, torch.int8)
        magnitudes = lanes.magnitudes(bits)
        scale = torch.stack([one[rows] for one in self._scales[tensors]]).view(-1, 2).T.to(torch.int32)
        tensor = torch.arange(tensors.start, tensors.stop, dtype=torch.int32, device=self._device)
        tensor = tensor[:, None].expand(count, scale.shape[1] // count).reshape(-1)
        half_max = lanes.unit_max(magnitudes)
        wanted = select(self._exponents, tensor * (127 * 8) + (scale << 3) + half_max)
        exponents = wanted.amax(0)
        index = tensor * (127 * 32) + (scale << 5) + exponents
        codes = _count_above(magnitudes, [select(table, index) for table in self._limits])
        if not self._grid.has_zero and bool((scale == 0).any()):
            kept = select(lanes.byte_units(self._device), (scale != 0) * 0x7F).view(torch.int64)
            magnitudes = (magnitudes.view(torch.int64) & kept).view(torch.int8)
        scale_bytes = select(self._scale_bytes, tensor * 32 + exponents).to(torch.uint8)
        return Piece(bits, magnitudes, codes, scale_bytes, torch.zeros(count, dtype=torch.bool))


class _Mxfp4Group:
    """Codes and scale bytes are the checkpoint's own; zero mode does not apply."""

    has_zero_mode = False

    def __init__(self, sources: Sequence[SourceArrays], data: list[torch.Tensor], grid: Grid) -> None:
        self._device, self._data = data[0].device, data
        self._scales = [torch.from_numpy(source.scale_bits).to(self._device) for source in sources]
        self.odd = [bool(source.scale_bits.max() >= RISKY_SCALE_BYTE) for source in sources]
        self._grid = grid

    def piece(self, tensors: slice, rows: slice) -> Piece:
        bits = lanes.unit_major([lanes.nibble_lanes(one[rows]) for one in self._data[tensors]], torch.int8)
        magnitudes = lanes.magnitudes(bits)
        codes = magnitudes if self._grid.has_zero else (magnitudes >= BIG_CODE).view(torch.int8)
        scale_bytes = torch.stack([one[rows] for one in self._scales[tensors]]).view(-1)
        odd = torch.zeros(tensors.stop - tensors.start, dtype=torch.bool)
        return Piece(bits, magnitudes, codes, scale_bytes, odd)


def _count_above(magnitudes: torch.Tensor, limits: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many limits each magnitude exceeds. Lanes int8; limits int32 [units or 1, blocks], 0 to 127."""
    units = lanes.byte_units(magnitudes.device)
    codes: torch.Tensor | None = None
    for limit in limits:
        above = torch.gt(magnitudes, select(units, limit).view(torch.int8)).view(torch.int8)
        codes = above if codes is None else codes.add_(above)
    assert codes is not None
    return codes
