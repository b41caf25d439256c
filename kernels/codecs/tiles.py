"""From the natural order of a matrix to lane words, through arrays that put the block's inside first.

"Block-major" is [8, rows * K/32 * 4]: axis 0 counts the eight runs of four consecutive k in a block of 32 (run =
4 h + t in the terms of layout.py), the other axis is row, block, k within the run. Reductions over a block and
operations with one number for each block then run over long contiguous stretches, and a run's four bytes are
already one lane's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import TILE_ROWS
from ziggurat.kernels.formats import U8, U32

RUNS = 8


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized rows of a matrix.

    Attributes:
        words: lane words [rows/16, 8, 4, K/32], uint32 for 2-bit and uint64 for e2m1 codes.
        scales: uint8 [rows, K/32].
        positive_zeros, negative_zeros: how many of the source's weights are exactly zero, by sign bit; left at 0
            where zeros need no care.
    """

    words: U32
    scales: U8
    positive_zeros: int = 0
    negative_zeros: int = 0


def block_major(values: U8, run_type: npt.DTypeLike) -> U8:
    """Reorder [rows, K (or K/2 pairs)] to [8, rows * K/32 * (4 weights)].

    Args:
        values: contiguous.
        run_type: a type as wide as four weights, so that they move as one.
    """
    runs = values.view(run_type).reshape(-1, RUNS)
    out = np.empty((RUNS, runs.shape[0]), runs.dtype)
    np.copyto(out, runs.T)
    return out.view(values.dtype)


def _registers(codes: U8, rows: int) -> tuple[U8, U8]:
    """Block-major [8, rows * X] as the registers of lane words: 0 and 2, 1 and 3, each uint64 [2, 4 t, rows/16, X]."""
    parts = codes.view(np.uint64).reshape(2, 4, rows // TILE_ROWS, 2, -1)
    return parts[:, :, :, 0], parts[:, :, :, 1]


def _each_byte(bits: int) -> np.uint64:
    return np.uint64(bits * 0x0101010101010101)


def _masked_shift(values: U8, left: int, mask: int) -> U8:
    """Every byte shifted to the left (or, if negative, to the right); the mask stops what came from the next byte."""
    shifted: U8 = values << np.uint64(left) if left >= 0 else values >> np.uint64(-left)
    shifted &= _each_byte(mask)
    return shifted


def _one_bit_each(even: U8, odd: U8) -> U8:
    """Registers 0 to 3 at bits 3 to 0 above where each is; for fields of one bit that leave the next three free."""
    both = even << 1
    both |= odd
    out: U8 = both[:1] << 2
    out |= both[1:]
    return out


def _combine(codes: U8, rows: int, grid: Grid) -> U8:
    """The bytes of lane words, as uint64 [words, 4 t, rows/16, X], of block-major codes [8, rows * X]."""
    even, odd = _registers(codes, rows)
    if grid.words == 1:
        return _one_bit_each(even, odd)
    out: U8 = even << 1
    out |= _masked_shift(odd, 4, 0x70)
    out |= _masked_shift(odd, -grid.sign_bit, 0x01)
    return out


def lane_words(codes: U8, rows: int, grid: Grid) -> U32:
    """Lane words of block-major codes.

    Args:
        codes: uint8 [8, rows * K/32 * 4], one code each.
        rows: a multiple of 16.

    Returns:
        [rows/16, 8, 4, K/32], uint32 or, where a lane has two words, uint64; contiguous along the last axis.
    """
    return _by_tile(_combine(codes, rows, grid))


def lane_words_from_pairs(even: U8, odd: U8, rows: int, grid: Grid) -> U32:
    """Lane words of codes kept apart by the parity of k: each block-major [8, rows * K/32 * 2]."""
    return _by_tile(_by_parity(_combine(even, rows, grid), _combine(odd, rows, grid)))


def level_words_from_nibbles(signs: U8, levels: U8, rows: int) -> U32:
    """Lane words of 2-bit codes, from bytes with one bit for the even k (bit 0) and one for the odd (bit 4).

    Args:
        signs, levels: block-major [8, rows * K/32 * 2].
    """
    upper, lower = (_one_bit_each(*_registers(bits, rows)) for bits in (signs, levels))
    return _by_tile(_from_nibbles(upper, lower))


def e2m1_words_from_nibbles(pairs: U8, rows: int) -> U32:
    """Lane words of e2m1 codes, from bytes with the even k in the low and the odd in the high nibble.

    Args:
        pairs: block-major [8, rows * K/32 * 2].
    """
    even, odd = _registers(pairs, rows)
    upper: U8 = even & _each_byte(0x88)
    upper |= odd & _each_byte(0x77)
    rest = even ^ odd
    rest ^= upper  # the even registers' magnitudes under the odd ones' signs
    lower = _masked_shift(rest, 1, 0xEE)
    lower |= _masked_shift(rest, -3, 0x11)
    return _by_tile(_from_nibbles(upper, lower))


def _from_nibbles(upper: U8, lower: U8) -> U8:
    """Lane words' bytes from their nibbles, which come with those of the even k below those of the odd k."""
    even = _masked_shift(upper, 4, 0xF0)
    even |= lower & _each_byte(0x0F)
    odd = upper & _each_byte(0xF0)
    odd |= _masked_shift(lower, -4, 0x0F)
    return _by_parity(even, odd)


def _by_parity(even: U8, odd: U8) -> U8:
    """Bytes of even and of odd k side by side: uint16 [words, 4 t, rows/16, X] of what _combine returns."""
    both: U8 = odd.view(np.uint8).astype(np.uint16)
    both <<= 8
    both |= even.view(np.uint8)
    return both


def _by_tile(bytes_: U8) -> U32:
    """Lane words from their bytes [words, 4 t, rows/16, 8 g and the rest]."""
    words: U32 = bytes_.view(np.uint32).reshape(*bytes_.shape[:3], 8, -1)
    if len(words) == 1:
        one: U32 = words[0]
        return one.transpose(1, 2, 0, 3)
    both = np.empty((*words.shape[1:], 2), np.uint32)
    both[..., 0], both[..., 1] = words
    joined: U32 = both.view(np.uint64)[..., 0]
    return joined.transpose(1, 2, 0, 3)
