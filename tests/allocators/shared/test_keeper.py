"""The arena process: roles, leases, room, and what it makes of strangers and of nonsense."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.keepers import KEY, attach, keeper, start_keeper
from ziggurat.allocators.shared import memory, messages
from ziggurat.allocators.shared.arena import SharedArena, attach_arena
from ziggurat.allocators.shared.errors import (
    ArenaRefusedError,
    ArenaUnreachableError,
    ProtocolError,
    SharedArenaError,
)
from ziggurat.allocators.shared.keeper import Keeper
from ziggurat.allocators.shared.lease import Lease, ask_status
from ziggurat.allocators.shared.messages import Attach, Grant, Status
from ziggurat.allocators.shared.segments import Segments

OTHER = "cd" * 32
ROW = 5 * 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def segments(path: Path) -> Iterator[Segments]:
    with keeper(path) as made:
        yield made


def put(arena: SharedArena, place: int, tag: int) -> None:
    """A whole row, all of whose bytes are its tag."""
    arena.share.fill(place)
    arena.view(place)[:] = bytes([tag]) * arena.stride
    arena.share.publish(place, tag, 1000 + tag)


def frozen(arena: SharedArena) -> bool:
    return arena.share.frozen


def rows(arena: SharedArena) -> dict[int, int]:
    """tag -> place, after a look at the bytes."""
    found = {}
    for place, tag, checksum in arena.share.published():
        assert checksum == 1000 + tag
        assert bytes(arena.view(place)) == bytes([tag]) * arena.stride
        found[tag] = place
    return found


def gone(segments: Segments, places: int = 0) -> Status:
    """The status once all leases but `places` have ended."""
    with segments._changed:
        assert segments._changed.wait_for(
            lambda: (
                sum((one.writer is not None) + len(one.readers) for one in segments._segments.values())
                == places
            ),
            10,
        )
    return segments.status()


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
    for _ in range(1000):
        if not arena.share.frozen:
            return
        threading.Event().wait(0.01)
    raise AssertionError("still frozen")


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
        _settled(lambda: segments.status().arenas[0].readers == (os.getpid(),))
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


def test_engines_go_on_when_the_process_is_gone(path: Path) -> None:
    process = start_keeper(path)
    writer, reader = attach(path), attach(path)
    told = {name: threading.Event() for name in ("writer", "reader")}
    writer.share.when_lost(told["writer"].set)
    reader.share.when_lost(told["reader"].set)
    put(writer, 1, 10)
    process.kill()
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
            assert "no huge pages" in caplog.text
        arena.close()


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


# -- who may ask, and what -----------------------------------------------------------------------------------------


def test_the_socket_is_its_owners_alone(path: Path, segments: Segments) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert segments.status().arenas == ()


def test_another_user_is_turned_away_on_both_sides(
    path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket.getsockopt

    def stranger(self: socket.socket, level: int, option: int, *rest: Any) -> Any:
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", 4242, os.geteuid() + 1, 0)
        return real(self, level, option, *rest)

    monkeypatch.setattr(socket.socket, "getsockopt", stranger)
    with pytest.raises(ArenaUnreachableError, match="belongs to user"):
        attach(path)
    monkeypatch.setattr(messages, "check_peer", lambda connection: 0)
    with _raw(path) as connection:
        connection.close()
    monkeypatch.undo()
    assert segments.status().arenas == ()


def test_two_processes_do_not_listen_at_one_place(path: Path, segments: Segments) -> None:
    with pytest.raises(ArenaUnreachableError, match="another arena process"):
        Keeper(path, Segments(1))
    assert ask_status(path).arenas == segments.status().arenas


def test_what_a_dead_one_left_is_replaced_and_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    process = start_keeper(path)
    process.kill()
    process.wait()
    assert path.exists()
    with keeper(path):
        attach(path).close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArenaUnreachableError, match="no socket"):
        Keeper(tmp_path / "file", Segments(1))
    assert (tmp_path / "file").read_text() == "mine"


GOOD = Attach(KEY, "test", 5, 8192).message()


def _raw(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def _say(path: Path, data: bytes, files: list[int] | None = None) -> bytes:
    """What comes back for one packet; nothing if the connection is closed."""
    with _raw(path) as connection:
        try:
            socket.send_fds(connection, [data], files or [])
            return connection.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            return b""


@pytest.mark.parametrize(
    "change",
    [
        {"key": "AB" * 32},
        {"key": "ab" * 31},
        {"key": 5},
        {"label": "x" * 201},
        {"label": "a\nb"},
        {"places": 0},
        {"places": -1},
        {"places": True},
        {"places": 1.5},
        {"places": 1 << 61},
        {"places": 10**30},
        {"stride": 100},
        {"stride": 0},
        {"node": -1},
        {"node": 5000},
        {"node": "0"},
        {"writable": 1},
        {"more": 1},
    ],
)
def test_a_request_that_makes_no_sense_is_dropped(
    path: Path, segments: Segments, change: dict[str, Any]
) -> None:
    assert _say(path, json.dumps({**GOOD, **change}).encode()) == b""
    assert segments.status().arenas == ()
    attach(path).close()


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"{",
        b"[" * 60_000,
        b"null",
        b"[]",
        b'{"op": "attach"}',
        b'{"op": "die", "version": 1}',
        b"\xff\xfe",
        json.dumps(GOOD).encode()[:-5],
        json.dumps({**GOOD, "label": "x" * 70_000}).encode(),
    ],
)
def test_nonsense_is_dropped_and_others_are_served(path: Path, segments: Segments, data: bytes) -> None:
    answer = _say(path, data)
    assert answer == b"" or json.loads(answer)["op"] == "refused"
    attach(path).close()
    gone(segments)


def test_another_version_is_told_so(path: Path, segments: Segments) -> None:
    answer = json.loads(_say(path, json.dumps({**GOOD, "version": 2}).encode()))
    assert (answer["op"], "version 1" in answer["reason"]) == ("refused", True)
    assert segments.status().arenas == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=300), seed=st.integers(0, 1 << 30))
def test_random_packets(path: Path, segments: Segments, data: bytes, seed: int) -> None:
    dice = random.Random(seed)
    good = bytearray(json.dumps(GOOD).encode())
    for _ in range(dice.randrange(4)):
        good[dice.randrange(len(good))] = dice.randrange(256)
    for packet in (data, bytes(good)):
        _say(path, packet)
    gone(segments)


def test_descriptors_that_strangers_send_are_closed(path: Path, segments: Segments) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for count in (1, 3, 9):
        end, other = os.pipe()
        os.close(other)
        _say(path, b'{"op": "status", "version": 1}', [end] * count)
        os.close(end)
    gone(segments)
    _settled(lambda: len(os.listdir("/proc/self/fd")) <= before)


def _settled(done: Callable[[], bool]) -> None:
    for _ in range(1000):
        if done():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


def test_a_holder_that_says_nonsense_loses_its_lease(path: Path, segments: Segments) -> None:
    lease = Lease.attach(path, Attach(KEY, "test", 5, 8192))
    messages.send(lease._connection, {"op": "frozen", "number": "many"})
    assert gone(segments).arenas[0].writer is None
    lease.close()


# -- what an engine makes of a process that lies -------------------------------------------------------------------


def _answering(path: Path, *answers: tuple[bytes, list[int]]) -> threading.Thread:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            connection.recv(1 << 16)
            for data, files in answers:
                socket.send_fds(connection, [data], files)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


GRANT = Grant("writer", False, ROW, False).message()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"", "closed"),
        (b"{", "not a message"),
        (b'{"op": "hello"}', "says"),
        (json.dumps({**GRANT, "role": "owner"}).encode(), "not a grant"),
        (json.dumps({**GRANT, "data_bytes": "all"}).encode(), "no number"),
        (json.dumps({**GRANT, "data_bytes": 4096}).encode(), "for 40960"),
        (json.dumps(GRANT).encode(), "0 descriptors"),
        (b'{"op": "refused", "reason": "no"}', "refuses: no"),
    ],
)
def test_an_answer_that_is_no_grant(path: Path, answer: bytes, match: str) -> None:
    thread = _answering(path, *([(answer, [])] if answer else []))
    with pytest.raises(SharedArenaError, match=match):
        attach(path)
    thread.join()


def test_memory_that_could_be_cut_off_is_not_mapped(path: Path) -> None:
    listing = memory.make_file("listing", 4096 + 80)
    whole, loose = memory.make_file("rows", 2 * ROW), os.memfd_create("rows")
    os.ftruncate(loose, ROW)
    try:
        for files in ([listing, loose], [listing, whole], [loose, loose], [listing]):
            thread = _answering(path, (json.dumps(GRANT).encode(), files))
            with pytest.raises(ProtocolError, match=r"descriptors|for good"):
                attach(path)
            thread.join()
            path.unlink()
    finally:
        for file in (listing, whole, loose):
            os.close(file)


def test_a_status_that_is_none(path: Path) -> None:
    for answer in (b'{"op": "status"}', b'{"op": "status", "arenas": [1]}', b'{"op": "granted"}'):
        thread = _answering(path, (answer, []))
        with pytest.raises(ProtocolError):
            ask_status(path)
        thread.join()
        path.unlink()
