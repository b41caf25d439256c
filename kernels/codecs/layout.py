"""Where each code and scale of a matrix lies in a row.

Weights are operand A of the m16n8k32 matrix instruction, so a matrix [N, K] is cut into tiles of 16 rows and 32 k. In a
tile, lane l = 4 g + t (g = 0..7, t = 0..3) owns sixteen weights: register r = 0..3, byte j = 0..3 is row
g + 8 (r & 1) and k = 4 t + j + 16 (r >> 1).

* 2-bit: one 32-bit word per lane and tile. Byte j holds the four registers' codes in bits [5:4], [7:6], [3:2],
  [1:0] for r = 0, 1, 2, 3; a code is sign << 1 | (1 if the level is 4). One shift and one LOP3 turn a register's
  codes into four e2m1 values.
* e2m1: two words. Byte j of word i holds register 2 i in the low and register 2 i + 1 in the high nibble.

Rows of tiles (16 rows of the matrix) follow each other. Within one, k-tiles are grouped so that a lane reads 16 bytes
at once: [K/32 / group][32 lanes][group] words with 4 tiles a group for 2-bit and 2 for e2m1. Scale bytes lie as
[K/32 / 4][16 rows][4]. A last group that K does not fill is just smaller.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ziggurat.kernels.formats import U8, U32

#: Bit position, in its byte, of the 2-bit code of register r.
W2_SHIFTS: Final = (4, 6, 2, 0)
TILE_ROWS: Final = 16
TILE_K: Final = 32
SCALE_GROUP: Final = 4


def grouped(
    plane: U8, tiles: int, lanes: tuple[int, ...], k_tiles: int, group: int, inner: int
) -> tuple[U8, U8]:
    """Views of a plane as its full groups and its last, smaller one.

    Args:
        plane: one dimension, tiles * prod(lanes) * k_tiles * inner elements.
        tiles: N / 16.
        lanes: shape of the lanes (or rows) within a group.
        k_tiles: K / 32.
        group: k-tiles in a full group.
        inner: elements for each lane and k-tile.

    Returns:
        [tiles, k_tiles // group, *lanes, group, inner] and [tiles, *lanes, k_tiles % group, inner].
    """
    full = k_tiles // group
    width = int(np.prod(lanes)) * inner
    by_tile = plane.reshape(tiles, k_tiles * width)
    head = by_tile[:, : full * group * width].reshape(tiles, full, *lanes, group, inner)
    rest = by_tile[:, full * group * width :].reshape(tiles, *lanes, k_tiles - full * group, inner)
    return head, rest


def write_words(plane: U8, words: tuple[U32, ...]) -> None:
    """Put lane words into a code plane.

    Args:
        plane: uint8 [N/16 * K/32 * 128 * len(words)].
        words: one (2-bit) or two (e2m1) arrays [N/16, 8 g, 4 t, K/32]; any strides.
    """
    tiles, _, _, k_tiles = words[0].shape
    group = 4 // len(words)
    head, rest = grouped(plane.view(np.uint32), tiles, (8, 4), k_tiles, group, len(words))
    full = k_tiles // group * group
    for i, word in enumerate(words):
        if full:
            head[..., i] = (
                word[..., :full].reshape(tiles, 8, 4, full // group, group).transpose(0, 3, 1, 2, 4)
            )
        if full < k_tiles:
            rest[..., i] = word[..., full:]


def read_words(plane: U8, tiles: int, k_tiles: int, count: int) -> tuple[U32, ...]:
    """The inverse of write_words: ``count`` arrays uint32 [N/16, 8, 4, K/32]."""
    group = 4 // count
    head, rest = grouped(plane.view(np.uint32), tiles, (8, 4), k_tiles, group, count)
    full = k_tiles // group * group
    words = []
    for i in range(count):
        word = np.empty((tiles, 8, 4, k_tiles), np.uint32)
        if full:
            word[..., :full].reshape(tiles, 8, 4, full // group, group)[...] = head[..., i].transpose(
                0, 2, 3, 1, 4
            )
        if full < k_tiles:
            word[..., full:] = rest[..., i]
        words.append(word)
    return tuple(words)


def write_scales(plane: U8, scales: U8) -> None:
    """Put scale bytes [N, K/32] into a scale plane uint8 [N * K/32]."""
    rows, k_tiles = scales.shape
    tiles = rows // TILE_ROWS
    head, rest = grouped(plane, tiles, (TILE_ROWS,), k_tiles, SCALE_GROUP, 1)
    full = k_tiles // SCALE_GROUP * SCALE_GROUP
    by_tile = scales.reshape(tiles, TILE_ROWS, k_tiles)
    if full:
        split = by_tile[..., :full].reshape(tiles, TILE_ROWS, full // SCALE_GROUP, SCALE_GROUP)
        head[..., 0] = split.transpose(0, 2, 1, 3)
    if full < k_tiles:
        rest[..., 0] = by_tile[..., full:]


def read_scales(plane: U8, rows: int, k_tiles: int) -> U8:
    """The inverse of write_scales: uint8 [N, K/32]."""
    tiles = rows // TILE_ROWS
    head, rest = grouped(plane, tiles, (TILE_ROWS,), k_tiles, SCALE_GROUP, 1)
    full = k_tiles // SCALE_GROUP * SCALE_GROUP
    scales = np.empty((tiles, TILE_ROWS, k_tiles), np.uint8)
    if full:
        split = scales[..., :full].reshape(tiles, TILE_ROWS, full // SCALE_GROUP, SCALE_GROUP)
        split[...] = head[..., 0].transpose(0, 2, 1, 3)
    if full < k_tiles:
        scales[..., full:] = rest[..., 0]
    return scales.reshape(rows, k_tiles)
