"""Where each code and scale of a matrix lies in a row.

Weights are operand A of the m16n8k32 matrix instruction, so a matrix [N, K] is cut into tiles of 16 rows and 32 k. In a
tile, lane l = 4 g + t (g = 0..7, t = 0..3) owns sixteen weights: register r = 0..3, byte j = 0..3 is row
g + 8 (r & 1) and k = 4 t + j + 16 (r >> 1).

* 2-bit: one 32-bit word per lane and tile. Byte j holds register r's sign in bit 7 - r and, in bit 3 - r, whether its
  level is 4. ``(word << r) & 0x88888888 | 0x30303030`` is register r as four E5M2 bytes, worth level * 2^-3.
* e2m1: two words. Byte j of word i holds register 2 i as sign in bit 7 and magnitude code in bits 3..1, register
  2 i + 1 as magnitude code in bits 6..4 and sign in bit 0. ``word & 0x8E8E8E8E`` is register 2 i as four E5M2 bytes,
  ``(word << 7) & 0x80808080 | (word >> 3) & 0x0E0E0E0E`` register 2 i + 1, all worth value * 2^-14.

An E5M2 byte is the upper half of a float16. So one storage feeds f16 matrix instructions, two weights from one logic
operation, and 8-bit block-scaled ones, four from one. The first layout (versions w2box-1 and f4box-1) unfolded into
e2m1 containers, which only block-scaled instructions read; everywhere else a weight cost twice the integer
instructions, whose rate is the limit there.

Rows of tiles (16 rows of the matrix) follow each other. Within one, k-tiles are grouped so that a lane reads 16 bytes
at once: [K/32 / group][32 lanes][group] words with 4 tiles a group for 2-bit and 2 for e2m1. Scale bytes lie as
[K/32 / 4][16 rows][4]. A last group that K does not fill is just smaller.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.formats import U8, U32

TILE_ROWS: Final = 16
TILE_K: Final = 32
SCALE_GROUP: Final = 4


#: What a lane reads at once; also a numpy type that moves 16 bytes as one.
_READ: Final = np.dtype(np.complex128)


def _grouped(plane: U8, tiles: int, lanes: tuple[int, ...], k_tiles: int, group: int) -> tuple[U8, U8]:
    """Views of a plane as its full groups and its last, smaller one.

    Args:
        plane: one dimension, tiles * prod(lanes) * k_tiles elements.
        tiles: N / 16.
        lanes: shape of the lanes (or rows) within a group.
        k_tiles: K / 32.
        group: k-tiles in a full group.

    Returns:
        [tiles, k_tiles // group, *lanes, group] and [tiles, *lanes, k_tiles % group].
    """
    full = k_tiles // group
    width = int(np.prod(lanes))
    by_tile = plane.reshape(tiles, k_tiles * width)
    head = by_tile[:, : full * group * width].reshape(tiles, full, *lanes, group)
    rest = by_tile[:, full * group * width :].reshape(tiles, *lanes, k_tiles - full * group)
    return head, rest


def _move(plane: U8, values: U8, group: int, read: np.dtype[Any], to_plane: bool) -> None:
    """Copy between a plane and values [tiles, *lanes, K/32], whose last axis is contiguous.

    Full groups move as one element of type ``read``.
    """
    tiles, *lanes, k_tiles = values.shape
    head, rest = _grouped(plane, tiles, tuple(lanes), k_tiles, group)
    full = k_tiles // group * group
    last = values.ndim - 1
    if full:
        by_group = head.view(read)[..., 0]
        by_lane = values[..., :full].view(read).transpose(0, last, *range(1, last))
        np.copyto(*((by_group, by_lane) if to_plane else (by_lane, by_group)))
    if full < k_tiles:
        tail = values[..., full:]
        np.copyto(*((rest, tail) if to_plane else (tail, rest)))


def write_words(plane: U8, words: U32) -> None:
    """Put lane words into a code plane.

    Args:
        plane: uint8 [N/16 * K/32 * 32 * bytes of a word].
        words: [N/16, 8 g, 4 t, K/32], contiguous along the last axis: uint32 for 2-bit codes; for e2m1 uint64,
            whose lower half is word 0.
    """
    _move(plane.view(words.dtype), words, 16 // words.itemsize, _READ, to_plane=True)


def read_words(plane: U8, tiles: int, k_tiles: int, dtype: npt.DTypeLike) -> U32:
    """The inverse of write_words: [tiles, 8, 4, k_tiles]."""
    words = np.empty((tiles, 8, 4, k_tiles), dtype)
    _move(plane.view(dtype), words, 16 // words.itemsize, _READ, to_plane=False)
    return words


def write_scales(plane: U8, scales: U8) -> None:
    """Put scale bytes [N, K/32], contiguous along K, into a scale plane uint8 [N * K/32]."""
    by_tile = scales.reshape(-1, TILE_ROWS, scales.shape[1])
    _move(plane, by_tile, SCALE_GROUP, np.dtype(np.uint32), to_plane=True)


def read_scales(plane: U8, rows: int, k_tiles: int) -> U8:
    """The inverse of write_scales: uint8 [N, K/32]."""
    scales = np.empty((rows // TILE_ROWS, TILE_ROWS, k_tiles), np.uint8)
    _move(plane, scales, SCALE_GROUP, np.dtype(np.uint32), to_plane=False)
    return scales.reshape(rows, k_tiles)
