"""From quantized lanes to the lane words of a row (layout.py says what lies where).

A weight's code comes as a number in its lane, its sign apart as the lane's top bit. The four registers of a lane word
are two rows and two halves of a block; their bits are moved to where they belong in a lane's top byte and joined, all
lanes at once.
"""

from __future__ import annotations

import torch

from ziggurat.kernels.codecs.lanes import repeated, width_of
from ziggurat.kernels.codecs.layout import TILE_ROWS


def level_words(signs: torch.Tensor, codes: torch.Tensor, rows: int) -> torch.Tensor:
    """2-bit words int32 [1, TP, rows/16, 8 g, K/32, TI] with t = TI * TP's index + TI's.

    signs: int64 [units, …], sign bits of lanes. codes: lanes, 1 for level 4 and 0 for level 1; they are changed.
    """
    lane = codes.dtype
    bits = _registers(codes, rows)
    bits <<= width_of(codes) - 5
    bits |= signs.view(bits.shape)
    pair = _down(bits[:, :, 1], 1, lane)
    pair |= bits[:, :, 0]
    halves = pair.view(2, len(bits) // 2, *pair.shape[1:])
    joined = _down(halves[1], 2, lane)
    joined |= halves[0]
    return _bytes(joined[None], lane)


def e2m1_words(signs: torch.Tensor, codes: torch.Tensor, rows: int) -> torch.Tensor:
    """e2m1 words int32 [2 words, TP, rows/16, 8 g, K/32, TI].

    signs: int64 [units, …], sign bits of lanes. codes: lanes, 0 to 7.
    """
    top = width_of(codes) - 8
    bits = _registers(codes, rows)
    signs = signs.view(bits.shape)
    words = bits[:, :, 0] << (top + 1)
    words |= signs[:, :, 0]
    words |= bits[:, :, 1] << (top + 4)
    words |= _down(signs[:, :, 1], 7, codes.dtype)
    return _bytes(words.view(2, len(signs) // 2, *words.shape[1:]), codes.dtype)


def _registers(codes: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [units, rows/16, 2, …]: the first eight rows of a tile and the others."""
    return codes.view(torch.int64).view(len(codes), rows // TILE_ROWS, 2, -1)


def _down(bits: torch.Tensor, places: int, lane: torch.dtype) -> torch.Tensor:
    """Bits of lanes moved down; what came from the lane above, or from the sign of 64 bits, is masked off.

    Every lane's bits lie in its top byte and the lowest `places` bits of it are free.
    """
    width = 8 * lane.itemsize
    moved = bits >> places
    moved &= repeated((0xFF >> places) << (width - 8), width)
    return moved


def _bytes(words: torch.Tensor, lane: torch.dtype) -> torch.Tensor:
    """The top bytes of lanes int64 [words, TP, rows/16, 8 rows], four of them a 32-bit word."""
    if lane.itemsize == 2:
        fields = words.view(torch.int16)
        fields >>= 8
        words = fields.to(torch.int8)
    by_row = words.view(torch.int32)
    count, parts, tiles, _ = by_row.shape
    return by_row.view(count, parts, tiles, 8, -1, 4 // parts)


def write_words(plane: torch.Tensor, words: torch.Tensor) -> None:
    """Put words into code planes.

    plane: uint8 [tensors, rows/16 * K/32 * 128 * words], one tensor's contiguous; starts on 4 bytes.
    words: int32 [words, TP, tensors, rows/16, 8, K/32, TI].
    """
    count, k_tiles = words.shape[0], words.shape[5]
    group = 4 // count
    full = k_tiles // group * group
    by_tile = plane.view(torch.int32).unflatten(1, (words.shape[3], -1))
    split = full * 32 * count
    if full:
        head = by_tile[..., :split].unflatten(-1, (full // group, 8, *words.shape[1::5], group, count))
        head.copy_(words[..., :full, :].unflatten(5, (-1, group)).permute(2, 3, 5, 4, 1, 7, 6, 0))
    if full < k_tiles:
        rest = by_tile[..., split:].unflatten(-1, (8, *words.shape[1::5], k_tiles - full, count))
        rest.copy_(words[..., full:, :].permute(2, 3, 4, 1, 6, 5, 0))


def write_scales(plane: torch.Tensor, scales: torch.Tensor) -> None:
    """Put scale bytes into scale planes.

    plane: uint8 [tensors, rows * K/32], one tensor's contiguous. scales: uint8 [tensors, rows, K/32].
    """
    k_tiles = scales.shape[2]
    by_tile = plane.unflatten(1, (scales.shape[1] // TILE_ROWS, -1))
    rows = scales.unflatten(1, (-1, TILE_ROWS))
    full = k_tiles // 4 * 4
    split = full * TILE_ROWS
    if full:
        head = by_tile[..., :split].unflatten(-1, (full // 4, TILE_ROWS, 4))
        head.copy_(rows[..., :full].unflatten(-1, (-1, 4)).transpose(2, 3))
    if full < k_tiles:
        by_tile[..., split:].unflatten(-1, (TILE_ROWS, k_tiles - full)).copy_(rows[..., full:])
