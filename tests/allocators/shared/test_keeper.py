"""The arena process: roles, leases, and room."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.keepers import KEY, attach, frozen, gone, keeper, put, rows, settled, start_keeper
from ziggurat.allocators import numa
from ziggurat.allocators.shared import memory
from ziggurat.allocators.shared.arena import SharedArena, attach_arena
from ziggurat.allocators.shared.errors import (
    ArenaRefusedError,
    ArenaUnreachableError,
)
from ziggurat.allocators.shared.lease import Lease, ask_status
from ziggurat.allocators.shared.messages import Attach
from ziggurat.allocators.shared.segments import Segments
from ziggurat.allocators.topology import numa_nodes

OTHER = "cd" * 32
ROW = 5 * 8192


# -- one engine after another --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("segments")
def test_rows_outlive_the_engine_that_read_them(path: Path, segments: Segments) -> None:
    first = attach(path)
    assert (first.share.role, first.share.private, first.places) == ("writer", 1, 6)
    assert first.share.free() == [1, 2, 3, 4, 5]
    put(first, 3, 30)
    put(first, 5, 50)
    first.close()
    gone(segments)
    second = attach(path, private=2)
    assert second.share.role == "writer"
    assert rows(second) == {30: 4, 50: 6}, "behind two private places now"
    assert second.share.free() == [2, 3, 5]
    second.close()


def test_private_places_are_nobody_elses(path: Path, segments: Segments) -> None:
    first = attach(path, private=2)
    first.tensor[0].fill_(9)
    first.close()
    gone(segments)
    second = attach(path, private=2)
    assert not second.tensor.any()
    second.close()


def test_a_place_that_was_being_filled_gets_other_pages(path: Path, segments: Segments) -> None:
    first = attach(path)
    put(first, 1, 10)
    first.share.fill(2)
    first.view(2)[:] = b"\xee" * 8192
    held = pages_held(first.view(2))  # as a device holds them that still writes for a process that is gone
    first._lease.close()
    assert gone(segments).arenas[0].lost == 0
    second = attach(path)
    assert 2 in second.share.free()
    assert not second.tensor[2].any()
    put(second, 2, 20)
    assert os.read(held, 8192) == b"\xee" * 8192, "they are still the old pages, which nobody else has"
    assert rows(second) == {10: 1, 20: 2}
    os.close(held)
    second.close()


def pages_held(view: memoryview) -> int:
    """A pipe that refers to the pages of a view themselves, not to a copy of their bytes."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    end, start = os.pipe()
    vector = Vector(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)
    taken = ctypes.CDLL(None).vmsplice(start, ctypes.byref(vector), ctypes.c_size_t(1), 0)
    os.close(start)
    assert taken == view.nbytes
    return end


def test_pages_that_cannot_be_told_apart_stay_lost(
    path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "renew", lambda *_: False)
    first = attach(path)
    first.share.fill(2)
    first.close()
    assert gone(segments).arenas[0].lost == 1
    second = attach(path)
    assert second.share.free() == [1, 3, 4, 5]
    second.close()


# -- several engines -----------------------------------------------------------------------------------------------


def test_the_second_engine_reads_the_same_memory(path: Path, segments: Segments) -> None:
    writer = attach(path)
    put(writer, 2, 20)
    reader = attach(path, private=0)
    assert (reader.share.role, reader.share.frozen, reader.share.free()) == ("reader", True, [])
    assert rows(reader) == {20: 1}
    seen = reader.share.changes
    put(writer, 4, 40)
    assert reader.share.changes > seen
    assert rows(reader) == {20: 1, 40: 3}
    assert reader.view(1).readonly
    with pytest.raises(TypeError):
        reader.share.vacate(1)
    status = segments.status().arenas[0]
    assert (status.writer, status.readers) == (os.getpid(), (os.getpid(),))
    reader.close()
    gone(segments, 1)
    writer.close()


def test_nothing_is_evicted_while_somebody_reads(path: Path, segments: Segments) -> None:
    writer = attach(path)
    assert not frozen(writer)
    readers = [attach(path), attach(path)]
    assert frozen(writer), "before the reader had its grant"
    readers[0].close()
    gone(segments, 2)
    assert frozen(writer)
    readers[1].close()
    gone(segments, 1)
    thawed(writer)
    again = attach(path)
    assert frozen(writer)
    again.close()
    writer.close()


def thawed(arena: SharedArena) -> None:
    settled(lambda: not arena.share.frozen)


def test_a_writer_that_follows_while_somebody_reads_evicts_nothing(path: Path, segments: Segments) -> None:
    writer = attach(path)
    put(writer, 1, 10)
    writer.share.fill(2)
    reader = attach(path)
    writer.close()
    assert gone(segments, 1).arenas[0].lost == 1, "the reader has its pages mapped"
    second = attach(path)
    assert (second.share.role, second.share.frozen) == ("writer", True)
    assert 2 not in second.share.free()
    reader.close()
    gone(segments, 1)
    thawed(second)
    second.close()
    assert gone(segments).arenas[0].lost == 0


def test_a_freeze_waits_for_the_lock_of_the_cache(path: Path, segments: Segments) -> None:
    writer = attach(path)
    lock = threading.Condition()
    writer.share.guarded_by(lock)
    readers: list[SharedArena] = []
    thread = threading.Thread(target=lambda: readers.append(attach(path)))
    with lock:
        thread.start()
        # Until the keeper waits for the answer.
        settled(lambda: segments.status().arenas[0].readers == (os.getpid(),))
        assert not frozen(writer)
        assert not readers
    thread.join()
    assert frozen(writer)
    readers[0].close()
    writer.close()


def test_a_writer_that_does_not_answer_keeps_readers_out(path: Path) -> None:
    with keeper(path, patience=0.05) as segments:
        silent = Lease.attach(path, Attach(KEY, "test", 5, 8192))  # which does not listen
        with pytest.raises(ArenaRefusedError, match="does not answer"):
            attach(path)
        silent.close()
        gone(segments)
        after = attach(path)
        assert after.share.role == "writer"
        after.close()


def test_ranks_have_arenas_of_their_own(path: Path, segments: Segments) -> None:
    one, other = attach(path), attach(path, key=OTHER)
    assert one.share.role == other.share.role == "writer"
    put(one, 1, 10)
    assert rows(other) == {}
    assert {status.key for status in segments.status().arenas} == {KEY, OTHER}
    one.close()
    other.close()


# -- endings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engines_go_on_when_the_process_is_gone(path: Path, number: signal.Signals) -> None:
    process = start_keeper(path)
    writer, reader = attach(path), attach(path)
    told = {name: threading.Event() for name in ("writer", "reader")}
    writer.share.when_lost(told["writer"].set)
    reader.share.when_lost(told["reader"].set)
    put(writer, 1, 10)
    process.send_signal(number)
    process.wait()
    assert all(event.wait(10) for event in told.values())
    assert writer.share.role == reader.share.role == "orphan"
    assert frozen(writer), "the reader may still be there, and cannot say any more when it leaves"
    put(writer, 2, 20)
    assert rows(reader) == {10: 1, 20: 2}
    late = threading.Event()
    writer.share.when_lost(late.set)
    assert late.is_set(), "who asks afterwards is told at once"
    with pytest.raises(ArenaUnreachableError, match="no arena process"):
        attach(path)
    with start_keeper(path) as other:
        fresh = attach(path)
        assert rows(fresh) == {}
        fresh.close()
        other.terminate()
    assert not path.exists()
    assert rows(reader) == {10: 1, 20: 2}
    reader.close()
    writer.close()


def test_a_lease_ends_with_its_engine_also_if_that_has_forked(path: Path, segments: Segments) -> None:
    writer = attach(path)
    put(writer, 1, 10)
    hold, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_go)
        os.read(hold, 1)
        os._exit(0)
    writer.close()
    assert gone(segments).arenas[0].writer is None, "the child has no part in the lease"
    os.close(let_go)
    os.waitpid(child, 0)
    os.close(hold)


def test_the_end_of_the_process_by_a_signal_removes_the_socket(path: Path) -> None:
    process = start_keeper(path, "--limit", str(1 << 20))
    assert ask_status(path).limit == 1 << 20
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not path.exists()


# -- room ----------------------------------------------------------------------------------------------------------


def test_arenas_nobody_uses_make_room_oldest_first(path: Path) -> None:
    with keeper(path, limit=2 * ROW) as segments:
        for key in (KEY, OTHER, KEY):
            attach(path, key=key).close()
            gone(segments)
        third = attach(path, key="ef" * 32)
        assert {one.key for one in segments.status().arenas} == {KEY, "ef" * 32}
        fourth = attach(path, key="01" * 32)
        assert {one.key for one in segments.status().arenas} == {"01" * 32, "ef" * 32}
        with pytest.raises(ArenaRefusedError, match=f"{ROW} bytes wanted, 0 are left"):
            attach(path)
        third.close()
        fourth.close()


def test_memory_that_the_machine_does_not_have_is_refused(path: Path) -> None:
    with (
        keeper(path, allocatable=lambda: ROW + 10, reserve=lambda have: 11),
        pytest.raises(ArenaRefusedError, match=f"{ROW - 1} are left"),
    ):
        attach(path)


def test_another_size_replaces_an_arena_nobody_uses_and_is_refused_otherwise(
    path: Path, segments: Segments
) -> None:
    writer = attach(path)
    put(writer, 1, 10)
    with pytest.raises(ArenaRefusedError, match="in use with 5 places of 8192 bytes, not 6 of 8192"):
        attach(path, places=6)
    writer.close()
    gone(segments)
    other = attach(path, places=6)
    assert (other.share.role, rows(other), len(other.share.free())) == ("writer", {}, 6)
    other.close()


def test_without_huge_pages_ordinary_ones_are_taken(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with keeper(path, huge=True) as segments:
        arena = attach(path)
        put(arena, 2, 20)
        assert rows(arena) == {20: 2}
        if not segments.status().arenas[0].huge:
            assert "of huge pages are free, too few, so ordinary ones" in caplog.text
        arena.close()


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Bytes of huge pages that are free for a test."""
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = int(reserved.read_text(encoding="ascii"))
    try:
        reserved.write_text(str(before + 8), encoding="ascii")
    except OSError:
        pytest.skip("huge pages cannot be reserved here")
    try:
        free = memory.free_huge_bytes(None)
        if free < 8 * memory.HUGE_PAGE:
            pytest.skip("the kernel has no 2 MiB pages left")
        yield free
    finally:
        reserved.write_text(str(before), encoding="ascii")


@pytest.mark.parametrize("node", [None, 0])
def test_reserved_pages_are_taken_whatever_else_is_free(
    path: Path, huge_pages: int, node: int | None
) -> None:
    """Reserved pages are no longer available memory; an arena that fits them needs nothing else."""
    if node is not None and not numa_nodes():
        pytest.skip("there are no NUMA nodes")
    with keeper(path, huge=True, allocatable=lambda: 0) as segments:
        assert segments.status().huge_pages == huge_pages
        stride, places = 3 * 4096, 500  # rows that cross the borders of pages
        want = Attach(KEY, "test", places, stride, node)
        arena = attach_arena(path, want, 3)
        (found,) = segments.status().arenas
        assert (found.huge, found.bytes) == (True, 6 << 20)
        assert memory.free_huge_bytes(node) == huge_pages - found.bytes
        arena.tensor.fill_(7)
        if node is not None:
            pages = numa.sample_pages(arena.tensor[3].data_ptr(), places * stride, 600)
            assert set(numa.nodes_of(pages)) == {node}
        put(arena, 7, 70)
        arena.close()
        gone(segments)
        again = attach_arena(path, want, 3)
        assert [(place, tag) for place, tag, _ in again.share.published()] == [(7, 70)]
        again.close()
        other = Attach("cd" * 32, "test", 6000, stride)
        with pytest.raises(ArenaRefusedError, match="are left to the arena process"):
            attach_arena(path, other, 0)


def test_progress_is_told(path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    from ziggurat.allocators.shared import keeper as keeper_module

    monkeypatch.setattr(keeper_module, "_SAY_EVERY", 1)
    monkeypatch.setattr(memory, "_CHUNK", 1 << 20)
    told: list[tuple[int, int]] = []
    arena = attach_arena(
        path, Attach(KEY, "test", 4, 1 << 20), 0, progress=lambda ready, whole: told.append((ready, whole))
    )
    assert told == [(n << 20, 4 << 20) for n in (1, 2, 3, 4)]
    arena.close()
