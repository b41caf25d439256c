"""Every code and scale at its documented place, and back."""

from __future__ import annotations

import numpy as np
import pytest

from support import scalar_codec as scalar
from ziggurat.kernels.codecs.grid import FP4_GRID, W2_GRID, Grid
from ziggurat.kernels.codecs.layout import read_scales, read_words, write_scales, write_words
from ziggurat.kernels.codecs.tiles import block_major, lane_words, lane_words_from_pairs

SHAPES = [(16, 32), (16, 64), (32, 96), (48, 128), (32, 160), (64, 224), (16, 416)]
GRIDS = {"w2": W2_GRID, "fp4": FP4_GRID}


def random_codes(grid: Grid, N: int, K: int) -> np.ndarray:
    return np.random.default_rng(N * K).integers(0, 4 if grid is W2_GRID else 16, (N, K)).astype(np.uint8)


def words_of(codes: np.ndarray, grid: Grid) -> np.ndarray:
    return lane_words(block_major(codes, np.uint32).view(np.uint8), codes.shape[0], grid)


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
    even = block_major(np.ascontiguousarray(codes[:, 0::2]), np.uint16)
    odd = block_major(np.ascontiguousarray(codes[:, 1::2]), np.uint16)
    assert (lane_words_from_pairs(even, odd, N, grid) == words_of(codes, grid)).all()


def test_the_scalar_places_use_every_bit_once() -> None:
    """The statement the tests compare with is itself a bijection, and follows the instruction's fragment."""
    for place, bits, K in ((scalar.w2_place, 2, 160), (scalar.fp4_place, 4, 96)):
        used = {(offset, shift) for n in range(32) for k in range(K) for offset, shift in [place(n, k, K)]}
        assert used == {(o, s) for o in range(32 * K * bits // 8) for s in range(0, 8, bits)}
    # a0-a3 are row g, a4-a7 row g + 8, a8-a11 row g at k + 16, a12-a15 both; four k for each lane of a group.
    assert scalar.fragment(0, 0) == (0, 0, 0)
    assert scalar.fragment(8, 5) == (1, 1, 1)
    assert scalar.fragment(3, 30) == (15, 2, 2)
    assert scalar.fragment(15, 31) == (31, 3, 3)


def test_the_kernels_bit_tricks_read_the_words() -> None:
    """One shift and one mask a register give e2m1 containers, for both codecs."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 4, (16, 32)).astype(np.uint8)
    word = words_of(codes, W2_GRID)
    container = {0b00: 0x08, 0b01: 0x18, 0b10: 0x28, 0b11: 0x38}  # sign in bit 5, magnitude bit 4, bit 3 set
    for g in range(8):
        for t in range(4):
            w = int(word[0, g, t, 0])
            registers = [(v & 0x30303030) | 0x08080808 for v in (w, w >> 2, w << 2, w << 4)]
            for r, register in enumerate(registers):
                for j in range(4):
                    code = int(codes[g + 8 * (r & 1), 4 * t + j + 16 * (r >> 1)])
                    assert (register >> (8 * j)) & 0xFF == container[code]
    nibbles = rng.integers(0, 16, (16, 32)).astype(np.uint8)
    pair = words_of(nibbles, FP4_GRID)
    for g in range(8):
        for t in range(4):
            for i in range(2):
                w = (int(pair[0, g, t, 0]) >> (32 * i)) & 0xFFFFFFFF
                for half, register in enumerate(((w << 2) & 0x3C3C3C3C, (w >> 2) & 0x3C3C3C3C)):
                    for j in range(4):
                        nibble = int(nibbles[g + 8 * half, 4 * t + j + 16 * i])
                        assert (register >> (8 * j)) & 0xFF == nibble << 2
