"""What the arena process makes of strangers and of nonsense, and engines of a process that lies."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.keepers import KEY, attach, frozen, gone, keeper, settled, start_keeper
from ziggurat.allocators.shared import memory, messages
from ziggurat.allocators.shared.arena import SharedArena
from ziggurat.allocators.shared.errors import (
    ArenaUnreachableError,
    ProtocolError,
    SharedArenaError,
)
from ziggurat.allocators.shared.keeper import Keeper
from ziggurat.allocators.shared.lease import Lease, ask_status
from ziggurat.allocators.shared.messages import Attach, Grant
from ziggurat.allocators.shared.segments import Segments

OTHER = "cd" * 32
ROW = 5 * 8192


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
    settled(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_holder_that_says_nonsense_keeps_its_lease(path: Path, segments: Segments) -> None:
    """It has the memory mapped, whatever it says."""
    lease = Lease.attach(path, Attach(KEY, "test", 5, 8192))
    for nonsense in (b"{", b"[]", b'{"op": "frozen", "number": "many"}', b'{"op": "die"}', b"x" * 70_000):
        lease._connection.send(nonsense)
    reader: list[SharedArena] = []
    thread = threading.Thread(target=lambda: reader.append(attach(path)))
    lease.listen(lambda: None, lambda: None, lambda: None)
    thread.start()
    thread.join()
    assert segments.status().arenas[0].writer == os.getpid()
    assert reader[0].share.role == "reader"
    reader[0].close()
    lease.close()
    assert gone(segments).arenas[0].writer is None


def test_an_engine_hears_nonsense_and_goes_on(path: Path, segments: Segments) -> None:
    writer = attach(path)
    with segments._changed:
        (segment,) = segments._segments.values()
        connection: Any = segment.writer
    for nonsense in (b"{", b'{"op": "freez"}', b"[]"):
        connection._connection.send(nonsense)
    reader = attach(path)
    assert frozen(writer)
    assert writer.share.role == "writer"
    reader.close()
    writer.close()


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
