"""Every code and scale at its documented place, and back."""

from __future__ import annotations

import numpy as np
import pytest

from support import scalar_codec as scalar
from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.codecs.layout import read_scales, read_words, write_scales, write_words
from ziggurat.kernels.codecs.tiles import (
    block_major,
    e2m1_words_from_nibbles,
    lane_words,
    lane_words_from_pairs,
    level_words_from_nibbles,
)

SHAPES = [(16, 32), (16, 64), (32, 96), (48, 128), (32, 160), (64, 224), (16, 416)]
GRIDS = {"w2": W2_GRID, "fp4": FP4_GRID}


def random_codes(grid: Grid, N: int, K: int) -> np.ndarray:
    """2-bit codes or nibbles: the sign is the bit above the magnitude."""
    return np.random.default_rng(N * K).integers(0, 2 * grid.magnitudes.size, (N, K)).astype(np.uint8)


def spread(codes: np.ndarray, grid: Grid) -> np.ndarray:
    """The codes that the package computes with: the sign further up."""
    size = grid.magnitudes.size
    out: np.ndarray = (codes // size << grid.sign_bit | codes % size).astype(np.uint8)
    return out


def words_of(codes: np.ndarray, grid: Grid) -> np.ndarray:
    return lane_words(block_major(spread(codes, grid), np.uint32).view(np.uint8), codes.shape[0], grid)


@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_every_code_is_at_its_place(codec: str, N: int, K: int) -> None:
    grid = GRIDS[codec]
    codes = random_codes(grid, N, K)
    plane = np.full(N * K * grid.words // 4, 0xEE, np.uint8)
    write_words(plane, words_of(codes, grid))
    expected, _ = scalar.write_matrix(codes.tolist(), [[0] * (K // 32)] * N, codec)
    assert plane.tobytes() == bytes(expected)
    words = read_words(plane, N // 16, K // 32, np.uint32 if codec == "w2" else np.uint64)
    assert (words == words_of(codes, grid)).all()


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_every_scale_is_at_its_place(N: int, K: int) -> None:
    scales = np.random.default_rng(N + K).integers(0, 256, (N, K // 32)).astype(np.uint8)
    plane = np.full(N * K // 32, 0xEE, np.uint8)
    write_scales(plane, scales)
    _, expected = scalar.write_matrix([[0] * K] * N, scales.tolist(), "w2")
    assert plane.tobytes() == bytes(expected)
    assert (read_scales(plane, N, K // 32) == scales).all()


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_pairs_of_codes_make_the_same_words(codec: str) -> None:
    grid, N, K = GRIDS[codec], 32, 160
    codes = random_codes(grid, N, K)
    even = block_major(np.ascontiguousarray(spread(codes, grid)[:, 0::2]), np.uint16)
    odd = block_major(np.ascontiguousarray(spread(codes, grid)[:, 1::2]), np.uint16)
    assert (lane_words_from_pairs(even, odd, N, grid) == words_of(codes, grid)).all()


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_nibbles_make_the_same_words(codec: str) -> None:
    grid, N, K = GRIDS[codec], 32, 160
    codes = random_codes(grid, N, K)
    pairs = block_major(np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4), np.uint16)
    if codec == "fp4":
        words = e2m1_words_from_nibbles(pairs, N)
    else:
        words = level_words_from_nibbles(pairs >> 1 & 0x11, pairs & 0x11, N)
    assert (words == words_of(codes, grid)).all()


@pytest.mark.parametrize("codec", ["w2", "fp4"])
def test_what_goes_into_words_is_left_as_it_was(codec: str) -> None:
    grid, N, K = GRIDS[codec], 16, 64
    codes = random_codes(grid, N, K)
    block = block_major(codes, np.uint32).view(np.uint8)
    pairs = block_major(np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4), np.uint16)
    before = block.tobytes(), pairs.tobytes()
    lane_words(block, N, grid)
    e2m1_words_from_nibbles(pairs, N)
    level_words_from_nibbles(pairs, pairs, N)
    assert (block.tobytes(), pairs.tobytes()) == before


def test_the_scalar_places_use_every_bit_once() -> None:
    """The statement the tests compare with is itself a bijection, and follows the instruction's fragment."""
    for place, bits, K in ((scalar.w2_place, 2, 160), (scalar.fp4_place, 4, 96)):
        used = [
            (offset, bit)
            for n in range(32)
            for k in range(K)
            for offset, bs in [place(n, k, K)]
            for bit in bs
        ]
        assert sorted(used) == [(o, bit) for o in range(32 * K * bits // 8) for bit in range(8)]
    # a0-a3 are row g, a4-a7 row g + 8, a8-a11 row g at k + 16, a12-a15 both; four k for each lane of a group.
    assert scalar.fragment(0, 0) == (0, 0, 0)
    assert scalar.fragment(8, 5) == (1, 1, 1)
    assert scalar.fragment(3, 30) == (15, 2, 2)
    assert scalar.fragment(15, 31) == (31, 3, 3)


def e5m2(byte: int) -> float:
    return scalar.as_float(scalar.small_float(byte, 5, 2, 15))


def test_the_kernels_bit_tricks_read_the_words() -> None:
    """Shifts and masks make E5M2 bytes, the upper halves of float16s, of a register's four codes at once."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 4, (16, 32)).astype(np.uint8)
    word = words_of(codes, W2_GRID)
    nibbles = rng.integers(0, 16, (16, 32)).astype(np.uint8)
    pair = words_of(nibbles, FP4_GRID)
    levels = {code: level for level, code in scalar.W2_CODES.items()}
    for g, t, j in np.ndindex(8, 4, 4):
        w = int(word[0, g, t, 0])
        first, second = int(pair[0, g, t, 0]) & 0xFFFFFFFF, int(pair[0, g, t, 0]) >> 32
        e2m1 = [
            value
            for w4 in (first, second)
            for value in (w4 & 0x8E8E8E8E, (w4 << 7) & 0x80808080 | (w4 >> 3) & 0x0E0E0E0E)
        ]
        for r in range(4):
            place = (g + 8 * (r & 1), 4 * t + j + 16 * (r >> 1))
            w2 = (w << r) & 0x88888888 | 0x30303030
            level, value = levels[int(codes[place])], scalar.as_float(scalar.e2m1(int(nibbles[place])))
            for register, scaled in ((w2, level / 8), (e2m1[r], value / 2**14)):
                byte = (register >> (8 * j)) & 0xFF
                assert e5m2(byte) == scaled
                assert np.signbit(e5m2(byte)) == np.signbit(scaled)
                assert np.array([byte << 8], np.uint16).view(np.float16)[0] == scaled
