"""Locked arenas: every page there, locked in whole rows, and everything undone if anything fails."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from support.cuda_fakes import FakeLocker, fake_driver
from ziggurat.allocators import numa
from ziggurat.allocators.errors import (
    AllocationError,
    ClosedError,
    NumaError,
    NumaPlacementError,
    PageLockError,
)
from ziggurat.allocators.lockers import CudaLocker, LockRefusedError, MlockLocker
from ziggurat.allocators.pinned import PinnedArena
from ziggurat.allocators.topology import numa_nodes
from ziggurat.allocators.wrappers import FaultyLocker

MIB = 1 << 20
STRIDE = 3 * 4096
needs_numa = pytest.mark.skipif(not numa_nodes(), reason="this kernel shows no NUMA nodes")


def test_every_byte_is_locked_once_in_chunks_of_whole_rows() -> None:
    locker = FakeLocker()
    arena = PinnedArena(100, STRIDE, locker=locker, chunk_bytes=7 * STRIDE + 1, threads=4)
    address = arena.tensor.data_ptr()
    assert address % (2 * MIB) == 0
    assert sorted(locker.locked.items()) == [
        (address + start * STRIDE, min(7, 100 - start) * STRIDE) for start in range(0, 100, 7)
    ]
    assert arena.device_pointer == address
    assert not bool(arena.tensor.any())
    arena.close()
    assert locker.locked == {}
    assert arena.device_pointer is None


def test_a_row_larger_than_a_chunk_is_a_chunk() -> None:
    locker = FakeLocker()
    arena = PinnedArena(3, 8192, locker=locker, chunk_bytes=4096)
    assert sorted(locker.locked.values()) == [8192] * 3
    arena.close()


@needs_numa
def test_all_pages_are_in_memory_on_the_node_it_was_bound_to() -> None:
    arena = PinnedArena(512, 8192, node=0, locker=FakeLocker(), chunk_bytes=MIB)
    pages = numa.sample_pages(arena.tensor.data_ptr(), arena.nbytes, 1 << 20)
    assert len(pages) == arena.nbytes // os.sysconf("SC_PAGE_SIZE")
    assert set(numa.nodes_of(pages)) == {0}
    arena.close()


@needs_numa
def test_a_node_that_is_not_here_leaves_nothing_locked() -> None:
    locker = FakeLocker()
    with pytest.raises(NumaError):
        PinnedArena(4, 4096, node=1000, locker=locker)
    assert locker.history == []


def test_pages_elsewhere_undo_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(what: str, address: int, nbytes: int, node: int) -> None:
        raise NumaPlacementError(what, node, {0: 3, 1: 5})

    monkeypatch.setattr(numa, "bind", lambda address, nbytes, node: None)
    monkeypatch.setattr(numa, "audit", elsewhere)
    locker = FakeLocker()
    with pytest.raises(NumaPlacementError) as caught:
        PinnedArena(8, 4096, node=1, locker=locker, chunk_bytes=4096)
    assert caught.value.pages == {0: 3, 1: 5}
    assert len(locker.history) == 8
    assert locker.locked == {}


def test_progress_is_told_in_the_makers_thread_up_to_the_whole() -> None:
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def progress(ready: int, whole: int) -> None:
        told.append((ready, whole))
        threads.add(threading.get_ident())

    locker = FakeLocker()
    arena = PinnedArena(10, 4096, locker=locker, progress=progress, chunk_bytes=3 * 4096, threads=2)
    assert [ready for ready, _ in told] == sorted(ready for ready, _ in told)
    assert len(told) == 4
    assert told[-1] == (40960, 40960)
    assert threads == {threading.get_ident()}
    assert threading.get_ident() not in locker.threads
    arena.close()


@pytest.mark.parametrize("chunk", [0, 1, 5, 9])
def test_a_refusal_at_any_chunk_unlocks_the_others(chunk: int) -> None:
    inner = FakeLocker()
    locker = FaultyLocker(inner, lambda number: number == chunk)
    with pytest.raises(PageLockError, match=f"injected at chunk {chunk}") as caught:
        PinnedArena(10, 4096, locker=locker, chunk_bytes=4096, threads=1)
    assert inner.locked == {}
    assert len(inner.history) == chunk  # with one thread nothing is locked after the refusal
    assert (caught.value.wanted, caught.value.locked) == (4096, chunk * 4096)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_refusal_among_many_threads_unlocks_the_others() -> None:
    for attempt in range(20):
        inner = FakeLocker()
        inner.fail_from = attempt
        with pytest.raises(PageLockError, match="the fake's limit; raise it"):
            PinnedArena(64, 4096, locker=inner, chunk_bytes=4096, threads=8)
        assert inner.locked == {}


def test_whoever_watches_may_stop_it() -> None:
    locker = FakeLocker()

    def stop(ready: int, whole: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PinnedArena(64, 4096, locker=locker, progress=stop, chunk_bytes=4096)
    assert locker.locked == {}


def test_memory_that_is_not_there_undoes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def populate(what: str, address: int, nbytes: int) -> None:
        if len(locker.history) >= 3:
            raise AllocationError(what, "the kernel", nbytes, None, "lower its size")

    monkeypatch.setattr("ziggurat.allocators.pinned.populate", populate)
    locker = FakeLocker()
    with pytest.raises(AllocationError):
        PinnedArena(10, 4096, locker=locker, chunk_bytes=4096, threads=1)
    assert len(locker.history) == 3
    assert locker.locked == {}


def test_chunks_that_are_apart_for_the_device_become_one_range() -> None:
    base: list[int] = []

    def view(address: int) -> int:
        base.append(address)
        return address + (1 << 40) + (4096 if address != min(base) else 0)

    locker = FakeLocker(view)
    arena = PinnedArena(4, 4096, locker=locker, chunk_bytes=4096, threads=1)
    address = arena.tensor.data_ptr()
    assert locker.locked == {address: 4 * 4096}
    assert arena.device_pointer == address + (1 << 40)
    arena.close()
    assert locker.locked == {}


def test_a_range_that_cannot_be_locked_as_one_either_is_an_error() -> None:
    locker = FakeLocker(lambda address: 0x1000)
    locker.fail_from = 4
    with pytest.raises(PageLockError, match="16384 bytes could not be locked after 0"):
        PinnedArena(4, 4096, locker=locker, chunk_bytes=4096)
    assert locker.locked == {}


def test_an_arena_that_is_forgotten_is_unlocked() -> None:
    locker = FakeLocker()
    arena = PinnedArena(4, 4096, locker=locker)
    row = arena.tensor[1]
    assert locker.locked
    del arena
    gc.collect()
    assert locker.locked == {}
    row.fill_(3)


def test_a_range_that_does_not_unlock_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(FakeLocker):
        def unlock(self, address: int, nbytes: int) -> None:
            super().unlock(address, nbytes)
            raise RuntimeError("no")

    locker = Stubborn()
    arena = PinnedArena(4, 4096, locker=locker, chunk_bytes=4096)
    with caplog.at_level(logging.WARNING):
        arena.close()
    assert locker.locked == {}
    assert "could not be unlocked" in caplog.text
    with pytest.raises(ClosedError):
        arena.view(0)


def test_mlock_really_locks_and_unlocks() -> None:
    def locked() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmLck:"))

    before = locked()
    arena = PinnedArena(512, 4096, locker=MlockLocker(), chunk_bytes=MIB)
    assert locked() - before == 2048
    assert arena.device_pointer is None
    arena.close()
    assert locked() == before


def test_a_locked_memory_limit_is_a_typed_error_with_its_number() -> None:
    code = (
        "import ctypes, resource\n"
        "from ziggurat.allocators import memlock_trial\n"
        "from ziggurat.allocators.errors import PageLockError\n"
        "from ziggurat.allocators.lockers import MlockLocker\n"
        "from ziggurat.allocators.pinned import PinnedArena\n"
        "memlock_trial._give_up_exemption()\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))\n"
        "try: PinnedArena(64, 4096, locker=MlockLocker(), chunk_bytes=32768, threads=1)\n"
        "except PageLockError as error: print(error.locked, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith("65536 host arena: 32768 bytes could not be locked after 65536")
    assert "locked-memory limit: 65536 bytes" in done.stdout


def test_a_forked_child_does_not_have_the_memory() -> None:
    arena = PinnedArena(4, 4096, locker=FakeLocker())
    address = arena.tensor.data_ptr()
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        os._exit(int(any(int(first, 16) <= address < int(last, 16) for first, last in ranges)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.close()


def test_cuda_registers_portable_and_mapped_in_every_thread() -> None:
    driver, library = fake_driver()
    library.window = 1 << 44
    arena = PinnedArena(16, 4096, locker=CudaLocker(2, driver=driver), chunk_bytes=4096, threads=4)
    assert set(library.flags) == {3}
    assert len(library.registered) == 16
    assert arena.device_pointer == arena.tensor.data_ptr() + (1 << 44)
    arena.close()
    assert library.registered == {}


@pytest.mark.parametrize(
    "call", ["cuMemHostRegister", "cuMemHostGetDevicePointer", "cuDevicePrimaryCtxRetain"]
)
def test_a_call_that_fails_leaves_nothing_registered(call: str) -> None:
    driver, library = fake_driver()
    library.refuse[call] = 2
    with pytest.raises(PageLockError, match=rf"{call}: CUDA_ERROR_2 \(error 2\).*on_limit: pageable"):
        PinnedArena(16, 4096, locker=CudaLocker(driver=driver), chunk_bytes=4096)
    assert library.registered == {}
    with pytest.raises(LockRefusedError):
        CudaLocker(driver=driver).lock(1 << 30, 4096)


def test_its_rows_hold_what_is_written_to_them() -> None:
    arena = PinnedArena(5, 8192, locker=FakeLocker(), chunk_bytes=8192)
    for place in range(5):
        arena.view(place)[:] = bytes([place + 1]) * 8192
    assert torch.equal(arena.tensor[:, 0], torch.arange(1, 6, dtype=torch.uint8))
    assert torch.equal(arena.tensor[:, -1], torch.arange(1, 6, dtype=torch.uint8))
    arena.close()
