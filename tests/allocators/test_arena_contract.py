"""The contract of every host arena. A new one joins by one line in ARENAS (marked `gpu` if it needs a device)."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from support.cuda_fakes import FakeLocker
from support.keepers import shared_arena
from ziggurat.allocators.arena import HostArena, MakeArena
from ziggurat.allocators.errors import ClosedError, GeometryError, PlaceError
from ziggurat.allocators.lockers import CudaLocker, MlockLocker
from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.pinned import PinnedArena
from ziggurat.allocators.topology import numa_nodes
from ziggurat.allocators.wrappers import ArenaFaults, ArenaStats, ByteBudget, counting, faulty, limiting


def mlocked(places: int, stride: int) -> HostArena:
    """Bound to node 0 where there are nodes, locked by mlock, in chunks of one or two places."""
    return PinnedArena(
        places, stride, node=0 if numa_nodes() else None, locker=MlockLocker(), chunk_bytes=8192
    )


def wrapped(make: MakeArena) -> MakeArena:
    """In a budget, statistics and faults that do nothing yet."""
    return limiting(counting(faulty(make, ArenaFaults()), ArenaStats()), ByteBudget(1 << 50))


ARENAS = [
    pytest.param(PageableArena, id="pageable"),
    pytest.param(mlocked, id="pinned-mlock"),
    pytest.param(lambda places, stride: PinnedArena(places, stride, locker=FakeLocker()), id="pinned-fake"),
    pytest.param(wrapped(PageableArena), id="wrapped-pageable"),
    pytest.param(wrapped(mlocked), id="wrapped-pinned"),
    pytest.param(shared_arena, id="shared"),
    pytest.param(partial(shared_arena, private=2), id="shared-and-private"),
    pytest.param(partial(shared_arena, locker=FakeLocker()), id="shared-pinned-fake"),
    pytest.param(partial(shared_arena, private=1, locker=MlockLocker()), id="shared-pinned-mlock"),
    pytest.param(wrapped(shared_arena), id="wrapped-shared"),
    pytest.param(PinnedArena, id="pinned-cuda", marks=pytest.mark.gpu),
    pytest.param(
        lambda places, stride: shared_arena(places, stride, private=1, locker=CudaLocker()),
        id="shared-cuda",
        marks=pytest.mark.gpu,
    ),
    pytest.param(wrapped(PinnedArena), id="wrapped-cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=ARENAS)
def make(request: pytest.FixtureRequest) -> MakeArena:
    factory: MakeArena = request.param
    return factory


@pytest.fixture
def arena(make: MakeArena) -> Iterator[HostArena]:
    made = make(5, 8192)
    yield made
    made.close()


def test_geometry(arena: HostArena) -> None:
    assert (arena.places, arena.stride, arena.nbytes) == (5, 8192, 5 * 8192)
    assert arena.kind
    assert arena.tensor.shape == (5, 8192)
    assert arena.tensor.dtype == torch.uint8
    assert arena.tensor.device.type == "cpu"


def test_the_device_sees_locked_memory_where_it_is_and_other_memory_not_at_all(arena: HostArena) -> None:
    assert arena.kind in ("pageable", "pinned")
    assert arena.device_pointer is None or (arena.kind == "pinned" and arena.device_pointer % 4096 == 0)


def test_views_are_writable_bytes_of_the_tensor(arena: HostArena) -> None:
    for place in range(arena.places):
        view = arena.view(place)
        assert (view.nbytes, view.format, view.ndim, view.readonly) == (arena.stride, "B", 1, False)
        view[:] = bytes([place + 1]) * arena.stride
    for place in range(arena.places):
        assert torch.equal(arena.tensor[place], torch.full((arena.stride,), place + 1, dtype=torch.uint8))
    arena.tensor[3].fill_(0xFF)
    assert bytes(arena.view(3)) == b"\xff" * arena.stride
    assert bytes(arena.view(2)) == b"\x03" * arena.stride


def test_every_place_starts_on_a_page(arena: HostArena) -> None:
    for place in range(arena.places):
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena.view(place)))
        assert address == arena.tensor[place].data_ptr()
        assert address % 4096 == 0


def test_a_file_is_read_straight_into_a_place(arena: HostArena, tmp_path: Path) -> None:
    row = os.urandom(arena.stride)
    path = tmp_path / "rows"
    path.write_bytes(bytes(arena.stride) + row)
    with path.open("rb") as file:
        assert os.preadv(file.fileno(), [arena.view(4)], arena.stride) == arena.stride
    assert bytes(arena.tensor[4].numpy()) == row


def test_different_places_are_filled_from_different_threads(make: MakeArena) -> None:
    arena = make(64, 4096)
    rows = [os.urandom(4096) for _ in range(64)]

    def fill(place: int) -> None:
        arena.view(place)[:] = rows[place]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fill, range(64)))
    assert [bytes(arena.view(place)) for place in range(64)] == rows
    arena.close()


@pytest.mark.parametrize("place", [-1, 5, 1 << 40])
def test_a_place_that_does_not_exist(arena: HostArena, place: int) -> None:
    with pytest.raises(PlaceError, match=f"place {place} is not in an arena of 5"):
        arena.view(place)


@pytest.mark.parametrize(
    ("places", "stride"), [(0, 4096), (-1, 4096), (1, 0), (1, 100), (1, 4097), (1, -4096)]
)
def test_a_geometry_that_cannot_be(make: MakeArena, places: int, stride: int) -> None:
    with pytest.raises(GeometryError, match=str(places if places < 1 else stride)):
        make(places, stride)


def test_a_closed_arena_says_so_and_its_views_do_not_dangle(make: MakeArena) -> None:
    arena = make(2, 4096)
    view, row = arena.view(1), arena.tensor[1]
    view[:] = b"\x07" * 4096
    arena.close()
    arena.close()
    gc.collect()
    for use in (lambda: arena.view(0), lambda: arena.tensor):
        with pytest.raises(ClosedError):
            use()
    assert bytes(view) == b"\x07" * 4096
    assert int(row.sum()) == 7 * 4096
    row.fill_(8)
    assert bytes(view) == b"\x08" * 4096
