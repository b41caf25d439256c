"""Batches of copies: merged where rows are side by side, and the same bytes whatever mover takes them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cuda_fakes import fake_driver
from ziggurat.allocators.cuda_driver import CudaDriver
from ziggurat.allocators.errors import CudaError
from ziggurat.allocators.movers import BatchedCopies, RowMover, ShiftedSource, SingleCopies, merge

MOVERS = [
    pytest.param(SingleCopies, id="single"),
    pytest.param(BatchedCopies, id="batched"),
    pytest.param(lambda driver: BatchedCopies(driver, overlap=False), id="batched-plain"),
]


def merged(dst: list[int], src: list[int], nbytes: list[int]) -> list[tuple[int, int, int]]:
    return [(int(a), int(b), int(c)) for a, b, c in zip(*merge(dst, src, nbytes), strict=True)]


def test_rows_side_by_side_at_both_ends_become_one_copy() -> None:
    assert merged([300, 100, 200, 500], [30, 10, 110, 130], [100, 100, 100, 7]) == [
        (100, 10, 200),
        (300, 30, 100),
        (500, 130, 7),
    ]
    assert merged([100, 200], [10, 111], [100, 100]) == [(100, 10, 100), (200, 111, 100)]
    assert merged([100, 201], [10, 110], [100, 100]) == [(100, 10, 100), (201, 110, 100)]
    assert merged([5], [6], [7]) == [(5, 6, 7)]
    high = (1 << 47) - 4096
    assert merged([high, high - 4096], [high - 4096, high - 8192], [4096, 4096]) == [
        (high - 4096, high - 8192, 8192)
    ]


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12))
def test_merging_never_changes_which_byte_goes_where(to: list[int], start: list[int], count: int) -> None:
    dst, src = [64 * one for one in to[:count]], [1000 + 64 * one for one in start[:count]]
    plain = {d + byte: s + byte for d, s in zip(dst, src, strict=True) for byte in range(64)}
    joined = {d + byte: s + byte for d, s, size in merged(dst, src, [64] * count) for byte in range(size)}
    assert joined == plain


@pytest.mark.parametrize("make", MOVERS)
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_every_row_arrives(make: Callable[[CudaDriver], RowMover], count: int) -> None:
    driver, _ = fake_driver()
    random = np.random.default_rng(count)
    source = random.integers(0, 256, (64, 96), dtype=np.uint8)
    target = np.zeros((64, 96), dtype=np.uint8)
    to, start = random.permutation(64)[:count], random.permutation(64)[:count]
    sizes = [int(one) for one in random.integers(1, 97, count)]
    make(driver).move(
        [target.ctypes.data + 96 * int(one) for one in to],
        [source.ctypes.data + 96 * int(one) for one in start],
        sizes,
        9,
    )
    wanted = np.zeros_like(target)
    for slot, place, size in zip(to, start, sizes, strict=True):
        wanted[slot, :size] = source[place, :size]
    assert np.array_equal(target, wanted)


def test_one_call_for_all_rows() -> None:
    driver, library = fake_driver()
    memory = np.zeros(1 << 16, dtype=np.uint8)
    base = memory.ctypes.data
    BatchedCopies(driver).move(
        [base, base + 64, base + 256], [base + 4096, base + 4160, base + 8192], [64] * 3, 5
    )
    assert library.calls.count("cuMemcpyBatchAsync") == 1
    assert library.batches[0] == ([base, base + 256], [base + 4096, base + 8192], [128, 64], 5)


def test_a_driver_that_takes_no_merged_rows_gets_them_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    driver, library = fake_driver()
    library.batch_limit = 64
    memory = np.arange(256, dtype=np.uint8)
    base = memory.ctypes.data
    mover = BatchedCopies(driver)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            mover.move([base + 64, base], [base + 192, base + 128], [64, 64], 5)
    assert np.array_equal(memory[:128], np.arange(128, 256))
    assert [len(one[0]) for one in library.batches] == [2, 2]
    assert library.calls.count("cuMemcpyBatchAsync") == 3
    assert caplog.text.count("takes no merged rows") == 1
    library.batch_limit = 1
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync"):
        mover.move([base + 64, base], [base + 192, base + 128], [64, 64], 5)


def test_a_source_that_is_elsewhere_for_the_device() -> None:
    driver, _ = fake_driver()
    memory = np.arange(256, dtype=np.uint8)
    base = memory.ctypes.data
    ShiftedSource(SingleCopies(driver), 64).move([base, base + 32], [base + 64, base + 96], [32, 32], 5)
    assert np.array_equal(memory[:64], np.arange(128, 192))
