"""The contract of every device pool. A new one joins by one line in POOLS (marked `gpu` if it needs a device)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cuda_fakes import FakeLane, FakeMover
from ziggurat.allocators.cuda_pool import CudaPool
from ziggurat.allocators.errors import ClosedError, GeometryError, PlaceError, RowError
from ziggurat.allocators.movers import SingleCopies
from ziggurat.allocators.pool import CpuPool, DevicePool

MakePool = Callable[[int, int], DevicePool]


def lazy_pool(slots: int, stride: int) -> CudaPool:
    """A CudaPool in host memory whose copies are done when somebody waits for them, and no sooner."""
    lane = FakeLane()
    mover, plain = FakeMover(lane), FakeMover(lane, eager=True)
    return CudaPool(
        slots, stride, "cpu", mover=mover, plain=plain, lane=lane, is_pinned=lambda row: row.numel() % 2 == 0
    )


POOLS = [
    pytest.param(CpuPool, id="cpu"),
    pytest.param(lazy_pool, id="lazy"),
    pytest.param(CudaPool, id="cuda", marks=pytest.mark.gpu),
    pytest.param(
        lambda slots, stride: CudaPool(slots, stride, mover=SingleCopies()),
        id="cuda-single",
        marks=pytest.mark.gpu,
    ),
]


@pytest.fixture(params=POOLS)
def make(request: pytest.FixtureRequest) -> MakePool:
    factory: MakePool = request.param
    return factory


@pytest.fixture
def pool(make: MakePool) -> Iterator[DevicePool]:
    made = make(6, 8192)
    made.tensor.fill_(0xFF)  # NaN in every float format, so that a byte that was not written shows
    yield made
    made.close()


def random_rows(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator) for length in lengths]


def test_geometry(pool: DevicePool) -> None:
    assert (pool.slots, pool.stride) == (6, 8192)
    assert pool.tensor.shape == (6, 8192)
    assert pool.tensor.dtype == torch.uint8
    assert pool.tensor.device == pool.device
    assert pool.tensor.is_contiguous()
    assert all(pool.row(slot).data_ptr() % 4096 == 0 for slot in range(6))


def test_rows_arrive_in_their_slots_and_nowhere_else(pool: DevicePool) -> None:
    rows = random_rows(8192, 8192, 8192)
    pool.write([4, 0, 2], rows)
    pool.ready()
    for slot, row in zip([4, 0, 2], rows, strict=True):
        assert torch.equal(pool.row(slot).cpu(), row)
        assert torch.equal(pool.tensor[slot].cpu(), row)
    for slot in (1, 3, 5):
        assert torch.equal(pool.row(slot).cpu(), torch.full((8192,), 0xFF, dtype=torch.uint8))


def test_a_shorter_row_fills_the_start_of_its_slot_and_leaves_the_next_one(pool: DevicePool) -> None:
    (row,) = random_rows(5000)
    pool.write([2], [row])
    pool.ready()
    assert torch.equal(pool.row(2)[:5000].cpu(), row)
    assert torch.equal(pool.row(3).cpu(), torch.full((8192,), 0xFF, dtype=torch.uint8))


def test_what_is_queued_before_a_write_sees_the_old_row_and_after_ready_the_new_one(pool: DevicePool) -> None:
    first, second = random_rows(8192, 8192)
    pool.write([3], [first])
    pool.ready()
    before = pool.row(3).clone()
    pool.write([3], [second])
    pool.ready()
    after = pool.row(3).clone()
    assert torch.equal(before.cpu(), first)
    assert torch.equal(after.cpu(), second)


def test_a_row_is_a_view_and_the_address_stays(pool: DevicePool) -> None:
    before, row = pool.tensor.data_ptr(), pool.row(1)
    pool.write([1], random_rows(8192))
    pool.ready()
    assert pool.tensor.data_ptr() == before
    assert row.data_ptr() == before + 8192
    assert torch.equal(row, pool.tensor[1])


def test_rows_need_not_be_contiguous_and_writing_none_is_fine(pool: DevicePool) -> None:
    (wide,) = random_rows(16384)
    pool.write([0], [wide[::2]])
    pool.ready()
    assert torch.equal(pool.row(0).cpu(), wide[::2])
    pool.write([], [])


def test_once_drained_a_row_may_change(pool: DevicePool) -> None:
    (row,) = random_rows(8192)
    kept = row.clone()
    pool.write([0], [row])
    pool.drain()
    row.zero_()
    pool.ready()
    assert torch.equal(pool.row(0).cpu(), kept)


@pytest.mark.parametrize("slots", [[0, 6], [-1, 0], [0, 0]])
def test_a_wrong_slot_writes_nothing(pool: DevicePool, slots: list[int]) -> None:
    with pytest.raises(PlaceError, match="slot"):
        pool.write(slots, random_rows(8192, 8192))
    assert bool((pool.tensor == 0xFF).all())


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(8193, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(1, 8192, dtype=torch.uint8),
        torch.zeros(8192, dtype=torch.int8),
        torch.zeros(2048, dtype=torch.float32),
        torch.zeros(8192, dtype=torch.uint8, device="meta"),
    ],
    ids=["long", "empty", "2-d", "i8", "f32", "elsewhere"],
)
def test_a_wrong_row_writes_nothing(pool: DevicePool, bad: torch.Tensor) -> None:
    with pytest.raises(RowError):
        pool.write([0, 1], [*random_rows(8192), bad])
    assert bool((pool.tensor == 0xFF).all())


def test_as_many_rows_as_slots(pool: DevicePool) -> None:
    with pytest.raises(RowError, match="1 rows for 2 slots"):
        pool.write([0, 1], random_rows(8192))
    assert bool((pool.tensor == 0xFF).all())


@pytest.mark.parametrize("slot", [-1, 6])
def test_a_slot_that_does_not_exist(pool: DevicePool, slot: int) -> None:
    with pytest.raises(PlaceError, match=f"slot {slot} is not in a pool of 6"):
        pool.row(slot)


@pytest.mark.parametrize(("slots", "stride"), [(0, 4096), (-3, 4096), (1, 0), (1, 4095), (1, 6000)])
def test_a_geometry_that_cannot_be(make: MakePool, slots: int, stride: int) -> None:
    with pytest.raises(GeometryError):
        make(slots, stride)


def test_a_closed_pool_says_so_and_its_rows_do_not_dangle(make: MakePool) -> None:
    pool = make(2, 4096)
    pool.write([1], [torch.full((4096,), 7, dtype=torch.uint8)])
    row = pool.row(1)
    pool.ready()
    pool.close()
    pool.close()
    gc.collect()
    for use in (lambda: pool.tensor, lambda: pool.row(0), lambda: pool.write([], [])):
        with pytest.raises(ClosedError):
            use()
    assert bool((row == 7).all())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4096)), max_size=12), st.integers(0, 1000))
@pytest.mark.parametrize("factory", POOLS)
def test_a_pool_is_what_was_written_last(factory: MakePool, writes: list[tuple[int, int]], seed: int) -> None:
    pool = factory(5, 4096)
    pool.tensor.zero_()
    model = torch.zeros(5, 4096, dtype=torch.uint8)
    lengths = [4096] * 5
    for number, (slot, length) in enumerate(writes):
        (row,) = random_rows(length, seed=seed + number)
        pool.write([slot], [row])
        model[slot, :length] = row
        lengths[slot] = length
    pool.ready()
    for slot, length in enumerate(lengths):
        assert torch.equal(pool.row(slot)[:length].cpu(), model[slot, :length])
    pool.close()
