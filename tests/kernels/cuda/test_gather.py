"""The gather kernel: what its launches are given, and on a GPU, that every byte arrives and no other is touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ziggurat.kernels.cuda.errors import LaunchError
from ziggurat.kernels.cuda.gather import CHUNK, MAX_ROWS, Batch, GatherKernel, columns


def test_a_batch_holds_its_rows_in_the_units_of_the_kernel() -> None:
    batch = Batch()
    assert batch.fill(columns([16, 1 << 40], [32, 48], [CHUNK, CHUNK + 16])) == 3
    params = batch.params
    assert (params.rows, params.dst[0], params.dst[1], params.src[1]) == (2, 16, 1 << 40, 48)
    assert list(params.vectors[:2]) == [CHUNK // 16, CHUNK // 16 + 1]
    assert batch.fill(columns([64], [80], [16])) == 1
    assert (params.rows, params.dst[0], params.src[0], params.vectors[0]) == (1, 64, 80, 1)
    assert batch.fill(columns([], [], [])) == 0


@pytest.mark.parametrize(
    ("dst", "src", "nbytes", "message"),
    [
        ([16], [16, 32], [16], "1 destinations, 2 sources and 1 sizes"),
        ([16, 24], [16, 32], [16, 16], "row 1: destination 0x18 is not a multiple of 16"),
        ([16], [33], [16], "row 0: source 0x21 is not a multiple of 16"),
        ([16, 32, 48], [16, 32, 48], [16, 16, 40], "row 2: size 0x28 is not a multiple of 16"),
        ([16], [16], [32 << 30], "row 0 has 34359738368 bytes"),
    ],
)
def test_what_the_kernel_cannot_copy_is_refused(
    dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        columns(dst, src, nbytes)


def _copy(sizes: Sequence[int], *, blocks: int | None = None, seed: int = 0) -> None:
    """Copy rows of these sizes from one pinned region, in another order and with gaps, and compare everything."""
    generator = np.random.default_rng(seed)
    gap = 48
    total = sum(sizes) + gap * (len(sizes) + 1)
    host = torch.empty(total, dtype=torch.uint8).pin_memory()
    host.copy_(torch.from_numpy(generator.integers(0, 256, total, np.uint8)))
    device = torch.full((total,), 0xEE, dtype=torch.uint8, device="cuda")
    expected = torch.full((total,), 0xEE, dtype=torch.uint8)
    starts = np.cumsum([gap, *(size + gap for size in sizes)])[:-1]
    order = generator.permutation(len(sizes))
    places = np.cumsum([gap, *(sizes[i] + gap for i in order)])[:-1]
    dst = [0] * len(sizes)
    for place, i in zip(places, order, strict=True):
        dst[i] = device.data_ptr() + int(place)
        expected[place : place + sizes[i]] = host[starts[i] : starts[i] + sizes[i]]
    mover = GatherKernel(0) if blocks is None else GatherKernel(0, blocks=blocks)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    mover.move(dst, [host.data_ptr() + int(start) for start in starts], list(sizes), stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(device.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 4096, CHUNK - 16, CHUNK, CHUNK + 16, 1 << 20, 7077888])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_rows_of_one_size_arrive(size: int, rows: int) -> None:
    _copy([size] * rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 7])
def test_more_rows_than_a_launch_takes_arrive(rows: int) -> None:
    _copy([4096] * rows)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 7, 32, 200])
def test_rows_of_many_sizes_arrive_with_any_number_of_blocks(blocks: int) -> None:
    sizes = [int(16 * n) for n in np.random.default_rng(blocks).integers(0, 30_000, 60)]
    _copy([0, *sizes, 0], blocks=blocks, seed=blocks)


@pytest.mark.gpu
def test_no_rows_are_no_launch() -> None:
    GatherKernel(0).move([], [], [], 0)
    GatherKernel(0).move([16], [16], [0], 0)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_row_that_the_host_rewrote_arrives_as_it_is_now() -> None:
    host = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    device = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    mover = GatherKernel(0)
    for value in range(1, 20):
        host.fill_(value)
        mover.move([device.data_ptr()], [host.data_ptr()], [1 << 20], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), host)


@pytest.mark.gpu
def test_a_dependent_launch_waits_for_what_is_in_front_of_it() -> None:
    """Each copy overwrites what the one before brought; the last must win, without a gap between them."""
    size = 4 << 20
    first, second = (torch.full((size,), value, dtype=torch.uint8).pin_memory() for value in (1, 2))
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    batches = [Batch(), Batch()]
    mover = GatherKernel(0)
    for source, batch in zip((first, second), batches, strict=True):
        batch.fill(columns([device.data_ptr()], [source.data_ptr()], [size]))
    for _ in range(20):
        for batch in batches:
            mover.kernel.launch(16, 512, batch.params, dependent=True)
        assert torch.equal(device.cpu(), second)


@pytest.mark.gpu
def test_a_captured_copy_reads_its_sources_at_every_replay() -> None:
    size = 1 << 20
    host = torch.zeros(size, dtype=torch.uint8).pin_memory()
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    mover = GatherKernel(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        mover.move([device.data_ptr()], [host.data_ptr()], [size], stream)
    for value in (3, 4, 5):
        host.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), host)
