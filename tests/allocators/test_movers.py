"""Batches of copies: the same bytes whatever mover takes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support.cuda_fakes import fake_driver
from ziggurat.allocators.cuda_driver import CudaDriver
from ziggurat.allocators.errors import CudaError
from ziggurat.allocators.movers import (
    FEW_ROWS,
    BatchedCopies,
    FewOrMany,
    RowMover,
    ShiftedSource,
    SingleCopies,
)

MOVERS = [
    pytest.param(SingleCopies, id="single"),
    pytest.param(BatchedCopies, id="batched"),
    pytest.param(lambda driver: BatchedCopies(driver, overlap=True), id="batched-overlap"),
    pytest.param(lambda driver: FewOrMany(SingleCopies(driver), BatchedCopies(driver)), id="few-or-many"),
]


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


def test_one_call_for_all_rows_and_a_copy_for_each() -> None:
    """Neighbours may lie in different registrations, which one copy must not cross."""
    driver, library = fake_driver()
    memory = np.zeros(1 << 16, dtype=np.uint8)
    base = memory.ctypes.data
    BatchedCopies(driver).move(
        [base + 64, base, base + 256], [base + 4160, base + 4096, base + 8192], [64] * 3, 5
    )
    assert library.calls.count("cuMemcpyBatchAsync") == 1
    sources = [base + 4096, base + 4160, base + 8192]
    assert library.batches[0] == ([base, base + 64, base + 256], sources, [64] * 3, 5)


@pytest.mark.parametrize(("rows", "call"), [(1, False), (FEW_ROWS, False), (FEW_ROWS + 1, True)])
def test_few_rows_get_a_call_each_and_many_one_for_all(rows: int, call: bool) -> None:
    driver, library = fake_driver()
    memory = np.zeros(1 << 16, dtype=np.uint8)
    base = memory.ctypes.data
    to, source = ([base + start + 64 * row for row in range(rows)] for start in (0, 4096))
    FewOrMany(SingleCopies(driver), BatchedCopies(driver)).move(to, source, [64] * rows, 5)
    assert library.calls.count("cuMemcpyBatchAsync") == int(call)
    assert library.calls.count("cuMemcpyHtoDAsync") == (0 if call else rows)


def test_what_the_driver_refuses_is_an_error() -> None:
    driver, library = fake_driver()
    library.batch_limit = 1
    memory = np.arange(256, dtype=np.uint8)
    base = memory.ctypes.data
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync"):
        BatchedCopies(driver).move([base + 64, base], [base + 192, base + 128], [64, 64], 5)


def test_a_source_that_is_elsewhere_for_the_device() -> None:
    driver, _ = fake_driver()
    memory = np.arange(256, dtype=np.uint8)
    base = memory.ctypes.data
    ShiftedSource(SingleCopies(driver), 64).move([base, base + 32], [base + 64, base + 96], [32, 32], 5)
    assert np.array_equal(memory[:64], np.arange(128, 192))
