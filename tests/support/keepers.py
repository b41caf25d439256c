"""Arena processes for tests: in a thread of this process, or in one of their own."""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ziggurat.allocators.lockers import PageLocker
from ziggurat.allocators.pages import check_geometry
from ziggurat.allocators.shared.arena import SharedArena, attach_arena
from ziggurat.allocators.shared.errors import ArenaUnreachableError
from ziggurat.allocators.shared.keeper import Keeper
from ziggurat.allocators.shared.lease import ask_status
from ziggurat.allocators.shared.messages import Attach, Status
from ziggurat.allocators.shared.segments import Segments

KEY = "ab" * 32


@contextmanager
def keeper(path: Path, limit: int = 1 << 30, **options: Any) -> Iterator[Segments]:
    """Listens at `path` in a thread; yields what it holds. options: of Segments."""
    segments = Segments(limit, **options)
    listening = Keeper(path, segments)
    thread = threading.Thread(target=listening.serve)
    thread.start()
    try:
        yield segments
    finally:
        listening.close()
        thread.join()


@functools.cache
def _everybodys_keeper() -> Path:
    """The socket of a keeper that stays for the whole run, in a process that ends with this one."""
    path = Path(tempfile.mkdtemp(prefix="ziggurat-arenas-")) / "socket"
    keeping = Keeper(path, Segments(1 << 30))
    threading.Thread(target=keeping.serve, daemon=True).start()
    return path


def shared_arena(
    places: int, stride: int, *, private: int = 0, locker: PageLocker | None = None
) -> SharedArena:
    """A MakeArena: of `places` places the first `private` are not shared, if there are more. Its key is its own."""
    check_geometry("host arena", places, stride)
    private = min(private, places - 1)
    want = Attach(secrets.token_hex(32), "test", places - private, stride, writable=locker is not None)
    return attach_arena(_everybodys_keeper(), want, private, locker=locker)


def attach(path: Path, places: int = 5, stride: int = 8192, private: int = 1, key: str = KEY) -> SharedArena:
    """An engine's arena."""
    return attach_arena(path, Attach(key, "test", places, stride), private)


def start_keeper(path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`ziggurat arena` as it is after it has replaced itself, answering."""
    command = [sys.executable, "-m", "ziggurat.allocators.shared.process", str(path), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for_keeper(path, process)
    return process


def wait_for_keeper(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until it answers. AssertionError if it ends instead."""
    while True:
        try:
            if ask_status(path).pid == process.pid:
                return
        except ArenaUnreachableError:
            pass
        assert process.poll() is None, f"it ended with {process.returncode}"
        os.sched_yield()
        time.sleep(0.005)


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


def settled(done: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    for _ in range(1000):
        if done():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")
