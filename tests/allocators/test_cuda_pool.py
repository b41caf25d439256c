"""The pool of a CUDA device, on a lane where copies happen only when somebody waits for them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from support.cuda_fakes import FakeLane, FakeMover
from ziggurat.allocators.cuda_pool import CudaPool


class Setup:
    """A pool of 6 slots whose rows of even first bytes count as page-locked."""

    def __init__(self) -> None:
        self.lane = FakeLane()
        self.mover, self.plain = FakeMover(self.lane), FakeMover(self.lane, eager=True)
        self.asked = 0
        self.pool = CudaPool(
            6, 4096, "cpu", mover=self.mover, plain=self.plain, lane=self.lane, is_pinned=self.is_pinned
        )
        self.pool.tensor.fill_(0xFF)

    def is_pinned(self, row: torch.Tensor) -> bool:
        self.asked += 1
        return int(row[0]) % 2 == 0


@pytest.fixture
def setup() -> Setup:
    return Setup()


def row(value: int, length: int = 4096) -> torch.Tensor:
    return torch.full((length,), value, dtype=torch.uint8)


def test_write_does_not_wait_and_ready_does(setup: Setup) -> None:
    setup.pool.write([2, 4], [row(2), row(4)])
    assert setup.lane.done == 0
    assert bool((setup.pool.tensor == 0xFF).all())
    setup.pool.ready()
    assert bool((setup.pool.row(2) == 2).all())
    assert bool((setup.pool.row(4) == 4).all())


def test_copies_come_after_what_is_on_the_current_stream(setup: Setup) -> None:
    setup.pool.write([2], [row(2)])
    setup.pool.write([3], [row(4)])
    assert setup.lane.followed == 2
    setup.pool.write([], [])
    assert setup.lane.followed == 2


def test_pools_on_one_lane_wait_for_their_own_rows_only(setup: Setup) -> None:
    """The parts of a ring: a later part may still be on its way when an earlier one is read."""
    later = CudaPool(
        2, 4096, "cpu", mover=setup.mover, plain=setup.plain, lane=setup.lane, is_pinned=setup.is_pinned
    )
    later.tensor.fill_(0xFF)
    setup.pool.write([0, 1], [row(2), row(4)])
    later.write([0, 1], [row(6), row(8)])
    setup.pool.ready()
    assert [int(setup.pool.row(slot)[0]) for slot in (0, 1)] == [2, 4]
    assert setup.lane.done == 2
    assert bool((later.tensor == 0xFF).all())
    later.ready()
    assert [int(later.row(slot)[0]) for slot in (0, 1)] == [6, 8]


def test_one_batch_for_locked_rows_and_another_for_the_rest(setup: Setup) -> None:
    rows = [row(2), row(3), row(4, 100), row(5)]
    setup.pool.write([5, 0, 3, 1], rows)
    base = setup.pool.tensor.data_ptr()
    assert setup.mover.moved == [
        ([base + 5 * 4096, base + 3 * 4096], [rows[0].data_ptr(), rows[2].data_ptr()], [4096, 100])
    ]
    assert setup.plain.moved == [
        ([base, base + 4096], [rows[1].data_ptr(), rows[3].data_ptr()], [4096, 4096])
    ]
    for one in rows:
        if one[0] % 2:
            one.zero_()  # ordinary memory was read before write returned
    setup.pool.ready()
    assert [int(setup.pool.row(slot)[0]) for slot in (5, 0, 3, 1)] == [2, 3, 4, 5]
    assert int(setup.pool.row(3)[100]) == 0xFF


def test_rows_of_one_arena_are_asked_about_once(setup: Setup) -> None:
    arena = torch.full((6, 4096), 2, dtype=torch.uint8)
    setup.pool.write([0, 1, 2, 3], [arena[5], arena[1], arena[3], arena[0]])
    assert setup.asked == 1
    assert len(setup.mover.moved[0][0]) == 4


def test_rows_live_until_their_copy_is_done(setup: Setup) -> None:
    one = row(2)
    gone = weakref.ref(one.untyped_storage())
    setup.pool.write([0], [one])
    del one
    gc.collect()
    assert gone() is not None
    setup.pool.drain()
    gc.collect()
    assert gone() is None
    assert bool((setup.pool.row(0) == 2).all())


def test_what_is_done_is_forgotten_without_waiting(setup: Setup) -> None:
    for _ in range(3):
        setup.pool.write([0], [row(2)])
        setup.pool.ready()
    setup.pool.write([0], [row(4)])
    assert setup.pool.pending() == 1
    setup.pool.write([1], [row(4)])
    assert setup.pool.pending() == 2
    setup.pool.drain()
    assert setup.pool.pending() == 0


def test_a_mover_that_fails_half_way_keeps_the_rows_it_was_given(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(setup.plain, "move", fail)
    with pytest.raises(RuntimeError, match="injected"):
        setup.pool.write([0, 1], [row(2), row(3)])
    assert len(setup.pool._under_way) == 1
    setup.pool.drain()
    assert bool((setup.pool.row(0) == 2).all())


def test_closing_waits_for_copies(setup: Setup) -> None:
    setup.pool.write([0], [row(2)])
    kept = setup.pool.row(0)
    setup.pool.close()
    assert bool((kept == 2).all())
