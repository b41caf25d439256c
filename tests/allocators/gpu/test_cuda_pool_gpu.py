"""The pool of a CUDA device, on one: order between streams, and whose memory it is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ziggurat.allocators.cuda_pool import CudaPool
from ziggurat.allocators.errors import AllocationError, CudaError
from ziggurat.allocators.movers import BatchedCopies, RowMover, SingleCopies
from ziggurat.allocators.pinned import PinnedArena

pytestmark = pytest.mark.gpu
STRIDE = 1 << 20
SLOTS = 64


def gather() -> RowMover:
    mover: RowMover = pytest.importorskip("ziggurat.kernels.cuda.gather").GatherKernel(0)
    return mover


MOVERS: list[Callable[[], RowMover]] = [BatchedCopies, SingleCopies, gather]


@pytest.fixture(scope="module")
def arena() -> Iterator[PinnedArena]:
    made = PinnedArena(128, STRIDE, chunk_bytes=5 * STRIDE)
    made.tensor.copy_(torch.randint(0, 256, (128, STRIDE), dtype=torch.uint8))
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.fixture(params=MOVERS, ids=lambda make: make.__name__)
def pool(request: pytest.FixtureRequest) -> Iterator[CudaPool]:
    made = CudaPool(SLOTS, STRIDE, "cuda:0", mover=request.param())
    made.tensor.fill_(0xFF)
    yield made
    made.close()


def busy() -> None:
    """Some milliseconds of work on the current stream."""
    torch.cuda._sleep(20_000_000)


def test_scattered_and_adjacent_rows_arrive(pool: CudaPool, arena: PinnedArena) -> None:
    slots = [*range(10, 20), 5, 3, 63, 0]
    places = [*range(30, 40), 99, 4, 5, 127]
    pool.write(slots, [arena.tensor[place] for place in places])
    pool.ready()
    result = pool.tensor.cpu()
    for slot, place in zip(slots, places, strict=True):
        assert torch.equal(result[slot], arena.tensor[place]), (slot, place)
    untouched = sorted(set(range(SLOTS)) - set(slots))
    assert bool((result[untouched] == 0xFF).all())


def test_a_kernel_that_still_reads_a_slot_sees_the_old_row(pool: CudaPool, arena: PinnedArena) -> None:
    pool.write([1], [arena.tensor[1]])
    pool.ready()
    busy()
    before = pool.row(1).clone()  # waits behind the work above, while the next row is already asked for
    pool.write([1], [arena.tensor[2]])
    pool.ready()
    after = pool.row(1).clone()
    torch.cuda.synchronize()
    assert torch.equal(before.cpu(), arena.tensor[1])
    assert torch.equal(after.cpu(), arena.tensor[2])


def test_writing_does_not_wait_for_the_device(pool: CudaPool, arena: PinnedArena) -> None:
    behind = torch.cuda.Event()
    pool.write([2], [arena.tensor[2]])
    pool.drain()
    torch.cuda._sleep(2_000_000_000)  # about a second
    behind.record()
    pool.write([3], [arena.tensor[3]])
    pool.ready()
    assert not behind.query()
    pool.drain()
    assert torch.equal(pool.row(3).cpu(), arena.tensor[3])


def test_any_stream_that_asks_sees_the_rows(pool: CudaPool, arena: PinnedArena) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy()
        pool.write([7, 8], [arena.tensor[70], arena.tensor[80]])
        pool.ready()
        seen = pool.tensor[7:9].clone()
    stream.synchronize()
    assert torch.equal(seen.cpu(), arena.tensor[[70, 80]])


def test_ordinary_memory_is_read_before_write_returns(pool: CudaPool) -> None:
    rows = [torch.randint(0, 256, (STRIDE,), dtype=torch.uint8) for _ in range(4)]
    kept = [row.clone() for row in rows]
    pool.write([0, 9, 4, 5], rows)
    for row in rows:
        row.zero_()
    pool.ready()
    for slot, row in zip([0, 9, 4, 5], kept, strict=True):
        assert torch.equal(pool.row(slot).cpu(), row)


def test_locked_and_ordinary_rows_in_one_call(pool: CudaPool, arena: PinnedArena) -> None:
    ordinary = torch.randint(0, 256, (STRIDE,), dtype=torch.uint8)
    pool.write([0, 1, 2], [arena.tensor[3], ordinary, arena.tensor[4]])
    pool.ready()
    assert torch.equal(pool.tensor[:3].cpu(), torch.stack([arena.tensor[3], ordinary, arena.tensor[4]]))


def test_a_thread_that_never_used_the_device_may_write(pool: CudaPool, arena: PinnedArena) -> None:
    def work() -> None:
        pool.write([11], [arena.tensor[11]])
        pool.drain()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
    assert torch.equal(pool.row(11).cpu(), arena.tensor[11])


def test_torch_counts_its_memory() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    pool = CudaPool(SLOTS, STRIDE, "cuda:0")
    assert torch.cuda.memory_allocated(0) - before >= SLOTS * STRIDE
    pool.close()
    assert torch.cuda.memory_allocated(0) == before


def test_more_than_the_device_has_is_refused_with_the_numbers() -> None:
    free, total = torch.cuda.mem_get_info(0)
    with pytest.raises(
        AllocationError, match=r"device pool: [0-9]+ bytes refused by device cuda:0"
    ) as caught:
        CudaPool(2 * free // STRIDE, STRIDE, "cuda:0")
    assert caught.value.have is not None
    assert 0 < caught.value.have <= total  # others may take and give meanwhile


def test_the_driver_takes_no_batch_on_the_default_stream(arena: PinnedArena) -> None:
    target = torch.zeros(STRIDE, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(CudaError, match="default stream"):
        BatchedCopies().move([target.data_ptr()], [arena.tensor.data_ptr()], [STRIDE], 0)
