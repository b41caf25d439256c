"""Arenas that are registered with a real driver."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from ziggurat.allocators import memlock_trial, numa
from ziggurat.allocators.cuda_driver import cuda_driver
from ziggurat.allocators.errors import PageLockError
from ziggurat.allocators.lockers import CudaLocker
from ziggurat.allocators.movers import BatchedCopies, SingleCopies
from ziggurat.allocators.opening import arena_node, open_arena
from ziggurat.allocators.pinned import PinnedArena
from ziggurat.allocators.topology import gpus, numa_nodes
from ziggurat.allocators.wrappers import FaultyLocker

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_it_is_locked_mapped_and_on_the_node_of_the_gpu() -> None:
    choice = arena_node("gpu-local", 0)
    told: list[int] = []
    arena = PinnedArena(
        512, MIB, node=choice.node, chunk_bytes=32 * MIB, progress=lambda ready, whole: told.append(ready)
    )
    assert told[-1] == arena.nbytes
    assert arena.tensor.is_pinned()
    assert arena.tensor[511, 5:].is_pinned()
    assert arena.device_pointer is not None
    if choice.node is not None:
        pages = numa.sample_pages(arena.tensor.data_ptr(), arena.nbytes, 4096)
        assert set(numa.nodes_of(pages)) == {choice.node}
    print(f"node {choice}, device pointer - host pointer = {arena.device_pointer - arena.tensor.data_ptr()}")
    arena.close()


def test_closing_unlocks_and_views_stay() -> None:
    arena = PinnedArena(4, MIB)
    row = arena.tensor[2]
    assert row.is_pinned()
    arena.close()
    assert not row.is_pinned()
    row.fill_(3)
    # The same memory can be registered again: nothing of it was left registered.
    locker = CudaLocker(0)
    locker.lock(row.data_ptr(), MIB)
    locker.unlock(row.data_ptr(), MIB)


@pytest.mark.parametrize("chunk", [0, 3, 7])
def test_a_refusal_half_way_leaves_nothing_registered(chunk: int) -> None:
    seen: list[tuple[int, int]] = []

    class Watching(CudaLocker):
        def lock(self, address: int, nbytes: int) -> int | None:
            seen.append((address, nbytes))
            return super().lock(address, nbytes)

        def unlock(self, address: int, nbytes: int) -> None:
            super().unlock(address, nbytes)
            seen.remove((address, nbytes))

    with pytest.raises(PageLockError):
        PinnedArena(
            8,
            MIB,
            locker=FaultyLocker(Watching(0), lambda number: number == chunk),
            chunk_bytes=MIB,
            threads=1,
        )
    assert seen == []


@pytest.mark.parametrize("batched", [True, False])
def test_neighbouring_rows_of_different_chunks_are_copied(batched: bool) -> None:
    """The driver refuses one copy across two registrations, and neighbouring rows would be merged into one."""
    arena = PinnedArena(16, MIB, chunk_bytes=2 * MIB)
    arena.tensor.copy_(torch.randint(0, 256, (16, MIB), dtype=torch.uint8))
    target = torch.full((16, MIB), 0xEE, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    mover = BatchedCopies() if batched else SingleCopies()
    to, source = (
        [base + row * MIB for row in range(16)] for base in (target.data_ptr(), arena.tensor.data_ptr())
    )
    mover.move(to, source, [MIB] * 16, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target.cpu(), arena.tensor)
    arena.close()


def test_kernels_may_read_it_where_the_device_pointer_says() -> None:
    gather = pytest.importorskip("ziggurat.kernels.cuda.gather")
    arena = PinnedArena(8, MIB, chunk_bytes=MIB)
    arena.tensor.copy_(torch.randint(0, 256, (8, MIB), dtype=torch.uint8))
    target = torch.full((8, MIB), 0xEE, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    assert arena.device_pointer is not None
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    gather.GatherKernel(0).move(
        [target[slot].data_ptr() for slot in range(8)],
        [arena.device_pointer + place * MIB for place in order],
        [MIB] * 8,
        stream.cuda_stream,
    )
    stream.synchronize()
    assert torch.equal(target.cpu(), arena.tensor[order])
    arena.close()


def test_pageable_instead_where_pages_cannot_be_locked() -> None:
    locker = FaultyLocker(CudaLocker(0), lambda number: True)
    arena = open_arena("pinned", 4, MIB, locker=locker, pageable_instead=True)
    assert arena.kind == "pageable"
    assert not arena.tensor.is_pinned()
    arena.close()


def test_the_gpu_is_found_by_its_bus() -> None:
    bus = cuda_driver().pci_bus_id(0)
    assert any(gpu.pci_bus_id.endswith(bus) for gpu in gpus().gpus)
    print(f"bus {bus}, nodes {[node.node for node in numa_nodes()]}, GPUs {gpus().gpus}")


def test_whether_registered_memory_counts_is_known_here() -> None:
    found = memlock_trial.registration_counts()
    print(f"registered memory counts against RLIMIT_MEMLOCK: {found}")
    assert found is not None


def test_a_child_that_forks_does_not_take_the_memory() -> None:
    arena = PinnedArena(4, MIB)
    arena.tensor.fill_(7)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    target = torch.zeros(4, MIB, dtype=torch.uint8, device="cuda:0")
    arena.tensor.fill_(9)  # without MADV_DONTFORK this could move the page away from under the device
    target.copy_(arena.tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((target == 9).all())
    ctypes.c_char.from_buffer(arena.view(0))
    arena.close()
