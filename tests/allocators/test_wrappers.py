"""Arenas around arenas: budgets, counts and faults, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from support.cuda_fakes import FakeLocker
from ziggurat.allocators.arena import HostArena, MakeArena
from ziggurat.allocators.errors import AllocationError, GeometryError, PlaceError
from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.pinned import PinnedArena
from ziggurat.allocators.wrappers import ArenaFaults, ArenaStats, ByteBudget, counting, faulty, limiting


def test_a_budget_refuses_before_memory_is_taken_and_gets_bytes_back() -> None:
    made: list[int] = []

    def make(places: int, stride: int) -> HostArena:
        made.append(places)
        return PageableArena(places, stride)

    budget = ByteBudget(10 * 4096)
    limited = limiting(make, budget)
    first = limited(6, 4096)
    with pytest.raises(
        AllocationError, match="20480 bytes refused by the budget of 40960 bytes, 16384 bytes are left"
    ) as caught:
        limited(5, 4096)
    assert (caught.value.wanted, caught.value.have) == (5 * 4096, 4 * 4096)
    assert made == [6]
    second = limited(4, 4096)
    assert budget.left == 0
    first.close()
    first.close()
    assert budget.left == 6 * 4096
    second.close()
    assert budget.left == budget.limit


def test_an_arena_that_cannot_be_made_costs_nothing() -> None:
    budget, stats = ByteBudget(1 << 20), ArenaStats()
    make = limiting(faulty(PageableArena, ArenaFaults(make={0: MemoryError("injected")})), budget)
    with pytest.raises(MemoryError):
        counting(make, stats)(4, 4096)
    assert budget.left == 1 << 20
    assert (stats.made, stats.refused, stats.bytes_open) == (0, 1, 0)
    with pytest.raises(GeometryError):
        limiting(PageableArena, budget)(-1, -4096)
    assert budget.left == 1 << 20


def test_statistics_count_what_is_open_and_what_was_touched() -> None:
    stats = ArenaStats()
    make = counting(PageableArena, stats)
    one, two = make(4, 4096), make(2, 8192)
    for place in (0, 1, 1, 3):
        one.view(place)
    two.view(0)
    with pytest.raises(PlaceError):
        two.view(2)
    assert (stats.made, stats.views, stats.touched, stats.bytes_open) == (2, 5, 4, 32768)
    one.close()
    one.close()
    assert (stats.closed, stats.touched, stats.bytes_open, stats.bytes_peak) == (1, 1, 16384, 32768)
    two.close()
    assert (stats.closed, stats.touched, stats.bytes_open) == (2, 0, 0)


def test_faults_of_making_and_of_viewing() -> None:
    faults = ArenaFaults(make={1: AllocationError("host arena", "a fault", 4096, None, "remove it")})
    make = faulty(PageableArena, faults)
    arena = make(4, 4096)
    with pytest.raises(AllocationError, match="a fault"):
        make(4, 4096)
    make(4, 4096).close()
    faults.views = {2: OSError("injected")}
    arena.view(1)
    with pytest.raises(OSError, match="injected"):
        arena.view(2)
    faults.views = {}
    arena.view(2)[:] = b"\1" * 4096
    assert int(arena.tensor.sum()) == 4096
    arena.close()


WRAPPERS: list[Callable[[MakeArena, ByteBudget, ArenaStats, ArenaFaults], MakeArena]] = [
    lambda make, budget, stats, faults: limiting(make, budget),
    lambda make, budget, stats, faults: counting(make, stats),
    lambda make, budget, stats, faults: faulty(make, faults),
]


@pytest.mark.parametrize(
    "order", list(itertools.permutations(range(3))), ids=lambda order: "".join(map(str, order))
)
def test_they_do_the_same_in_any_order(order: tuple[int, ...]) -> None:
    budget, stats, faults = ByteBudget(8 * 4096), ArenaStats(), ArenaFaults(views={1: OSError("injected")})
    locker = FakeLocker()
    make: MakeArena = lambda places, stride: PinnedArena(places, stride, locker=locker)  # noqa: E731
    for index in order:
        make = WRAPPERS[index](make, budget, stats, faults)
    arena = make(8, 4096)
    assert (arena.kind, arena.places, arena.stride, arena.nbytes) == ("pinned", 8, 4096, 32768)
    assert arena.device_pointer == arena.tensor.data_ptr()
    arena.view(0)
    with pytest.raises(OSError, match="injected"):
        arena.view(1)
    with pytest.raises(AllocationError, match="the budget"):
        make(1, 4096)
    assert (stats.made, stats.bytes_open, budget.left) == (1, 32768, 0)
    arena.close()
    assert locker.locked == {}
    assert (stats.bytes_open, budget.left) == (0, 32768)
