"""The contract of readers on a disk that does not answer, run over both readers and every way in which they hang."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import pytest

from support.hanging_disk import HangingDisk, hanging_disk
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.readers import ring as io
from ziggurat.stores.readers import uring
from ziggurat.stores.readers.base import ReadDone, Reader, ReadJob
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.late import GRACE, LateRead, ReadTimeoutError
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.uring import UringReader

ROW = 8192
ROWS = 16
LIMIT = 0.3
THREADS = 3
FOR_EVER = 1 << 62


class Disk(Protocol):
    """A file of ROWS rows whose reads can be made to hang."""

    path: Path

    def open(self, timeout: float | None = LIMIT) -> Reader: ...

    def hang(self, start: int = 0, end: int = FOR_EVER) -> None: ...

    def asked(self) -> None:
        """Wait until a read hangs: before that it can be cancelled, or be one that was never begun."""

    def answer(self) -> None: ...


class BlockingCalls:
    """preadv that does not return."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._range = (0, 0)
        self._asked = threading.Event()
        self._answered = threading.Event()

    def open(self, timeout: float | None = LIMIT) -> Reader:
        return PreadReader(self.path, threads=THREADS, timeout=timeout, preadv=self._preadv)

    def hang(self, start: int = 0, end: int = FOR_EVER) -> None:
        self._answered.clear()
        self._range = (start, end)

    def asked(self) -> None:
        assert self._asked.wait(60)

    def answer(self) -> None:
        self._range = (0, 0)
        self._answered.set()

    def _preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if touches(self._range, offset, sum(map(len, buffers))):
            self._asked.set()
            assert self._answered.wait(60)
        return os.preadv(fd, buffers, offset)


class WithheldAnswers:
    """A ring that does not hear of the ends of reads, nor of their being cancelled."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._range = (0, 0)
        reads: dict[tuple[int, int], tuple[int, int]] = {}
        withheld: dict[int, list[io.Completion]] = {}
        push, reap, enter = io.Ring.push, io.Ring.reap, io.Ring.enter

        def pushed(ring: io.Ring, opcode: int, user_data: int, **rest: int) -> None:
            if opcode in (io.READ, io.READV):
                nbytes = rest["length"] if opcode == io.READ else rest["length"] * ROW
                reads[id(ring), user_data] = (rest["offset"], nbytes)
            push(ring, opcode, user_data, **rest)

        def reaped(ring: io.Ring) -> list[io.Completion]:
            found = withheld.pop(id(ring), []) + reap(ring)
            held = [one for one in found if self._holds(reads.get((id(ring), one.user_data)))]
            if held:
                withheld[id(ring)] = held
            return [one for one in found if one not in held]

        def entered(ring: io.Ring, wait: bool, timeout: float | None = None) -> None:
            # Answers that were withheld come without the kernel's doing, so whoever waits has to look now and then.
            enter(ring, wait, min(0.02, 0.02 if timeout is None else timeout) if wait else None)

        patch.setattr(uring._EventRing, "push", pushed)
        patch.setattr(uring._EventRing, "reap", reaped)
        patch.setattr(uring._EventRing, "enter", entered)

    def open(self, timeout: float | None = LIMIT) -> Reader:
        return UringReader(self.path, threads=THREADS, timeout=timeout)

    def hang(self, start: int = 0, end: int = FOR_EVER) -> None:
        self._range = (start, end)

    def asked(self) -> None:
        pass  # being cancelled is withheld as well

    def answer(self) -> None:
        self._range = (0, 0)

    def _holds(self, read: tuple[int, int] | None) -> bool:
        return read is not None and touches(self._range, *read)


class RealDisk:
    """A real file on a filesystem that does not answer."""

    def __init__(self, path: Path, make: Callable[[float | None], Reader], disk: HangingDisk) -> None:
        self.path = path
        self._make, self._disk = make, disk

    def open(self, timeout: float | None = LIMIT) -> Reader:
        return self._make(timeout)

    def hang(self, start: int = 0, end: int = FOR_EVER) -> None:
        self._disk.hang(start, end)

    def asked(self) -> None:
        self._disk.wait_held()

    def answer(self) -> None:
        self._disk.answer()


def touches(hung: tuple[int, int], offset: int, nbytes: int) -> bool:
    return offset < hung[1] and hung[0] < offset + nbytes


@contextmanager
def real_disk(
    file: Path, work: Path, kind: type[PreadReader] | type[UringReader], direct: Literal["auto", "never"]
) -> Iterator[Disk]:
    with hanging_disk(file.parent, work) as disk:
        if disk is None:
            pytest.skip("needs FUSE and the right to mount")
        path = disk.folder / file.name

        def make(timeout: float | None) -> Reader:
            return kind(path, threads=THREADS, timeout=timeout, direct=direct)

        yield RealDisk(path, make, disk)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late") / "rows"
    path.write_bytes(os.urandom(ROW * ROWS))
    return path


@pytest.fixture(
    params=["calls", "answers", "pread-direct", "pread-buffered", "io_uring-direct", "io_uring-buffered"]
)
def disk(
    request: pytest.FixtureRequest, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    how = request.param
    if ("io_uring" in how or how == "answers") and io.problem() is not None:
        pytest.skip(str(io.problem()))
    if how == "calls":
        yield BlockingCalls(file)
    elif how == "answers":
        yield WithheldAnswers(file, monkeypatch)
    else:
        kind = PreadReader if how.startswith("pread") else UringReader
        with real_disk(file, tmp_path, kind, "auto" if how.endswith("direct") else "never") as made:
            yield made


class Jobs:
    """Rows to read, whose buffers somebody takes over."""

    def __init__(self, rows: list[int]) -> None:
        self.late: dict[int, LateRead] = {}
        self.jobs = [ReadJob(row * ROW, aligned_buffer(ROW), row, partial(self._take, row)) for row in rows]

    def _take(self, row: int, late: LateRead) -> None:
        assert row not in self.late
        self.late[row] = late

    def read(self, reader: Reader) -> dict[int, ReadDone]:
        # Fresh, since what the page cache has needs no disk.
        ends = {end.tag: end for end in reader.read(self.jobs, fresh=True)}
        assert sorted(ends) == sorted(job.tag for job in self.jobs)
        return ends

    def good(self, file: Path, ends: dict[int, ReadDone]) -> list[int]:
        content = file.read_bytes()
        good = [tag for tag, end in ends.items() if end.error is None]
        for job in self.jobs:
            if job.tag in good:
                assert job.buffer.tobytes() == content[job.offset : job.offset + ROW]
        return sorted(good)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


EVERY_OTHER = list(range(0, ROWS, 2))


def test_one_read_that_does_not_return(disk: Disk, file: Path) -> None:
    reader = disk.open()
    disk.hang(6 * ROW, 6 * ROW + 1)
    jobs = Jobs([0, 6, 14])  # too far apart for the kernel to read one for the sake of another
    begun = time.monotonic()
    ends = jobs.read(reader)
    assert LIMIT <= time.monotonic() - begun < LIMIT + 5
    assert jobs.good(file, ends) == [0, 14]
    error = ends[6].error
    assert isinstance(error, ReadTimeoutError)
    assert (error.errno, error.path, error.offset, error.nbytes) == (errno.ETIMEDOUT, disk.path, 6 * ROW, ROW)
    assert error.seconds >= LIMIT
    assert f"at {6 * ROW} has not returned in {error.seconds:.1f} s" in str(error)
    assert set(jobs.late) == {6}
    assert not jobs.late[6].over
    # The others of the file are read meanwhile.
    more = Jobs([1, 13])
    assert more.good(file, more.read(reader)) == [1, 13]
    disk.answer()
    wait_until(lambda: jobs.late[6].over)
    again = Jobs([6])
    assert again.good(file, again.read(reader)) == [6]
    reader.close()


def test_nothing_is_written_once_a_late_read_is_over(disk: Disk) -> None:
    reader = disk.open()
    disk.hang()
    jobs = Jobs([3])
    (end,) = jobs.read(reader).values()
    assert isinstance(end.error, ReadTimeoutError)
    disk.answer()
    wait_until(lambda: jobs.late[3].over)
    jobs.jobs[0].buffer[:] = b"\xaa" * ROW
    reader.close()
    assert jobs.jobs[0].buffer.tobytes() == b"\xaa" * ROW


def test_memory_outlives_a_late_read(disk: Disk) -> None:
    reader = disk.open()
    disk.hang()
    memory = aligned_buffer(ROW)
    alive = weakref.ref(memory)
    over = threading.Event()

    def take(late: LateRead) -> None:
        late.then(over.set)

    (end,) = reader.read([ReadJob(0, memory, 0, take)])
    assert isinstance(end.error, ReadTimeoutError)
    del memory, end
    reader.close()
    gc.collect()
    assert alive() is not None
    assert not over.is_set()
    disk.answer()
    assert over.wait(30)
    wait_until(lambda: gc.collect() >= 0 and alive() is None)


def test_neighbours_are_given_up_together(disk: Disk, file: Path) -> None:
    reader = disk.open()
    disk.hang(2 * ROW, 2 * ROW + 1)
    jobs = Jobs([1, 2, 3])
    ends = jobs.read(reader)
    lost = [tag for tag, end in ends.items() if isinstance(end.error, ReadTimeoutError)]
    assert sorted([*jobs.good(file, ends), *lost]) == [1, 2, 3]
    assert 2 in lost
    assert {row for row, late in jobs.late.items() if not late.over} == set(lost)
    disk.answer()
    wait_until(lambda: all(late.over for late in jobs.late.values()))
    reader.close()


def test_a_disk_that_is_gone_is_not_waited_for_again_and_again(disk: Disk, file: Path) -> None:
    reader = disk.open()
    disk.hang()
    late: list[LateRead] = []
    for _ in range(THREADS):
        jobs = Jobs(EVERY_OTHER)
        ends = jobs.read(reader)
        assert all(isinstance(end.error, ReadTimeoutError) for end in ends.values())
        late += jobs.late.values()
        if len(late) >= THREADS:
            break
    begun = time.monotonic()
    jobs = Jobs(EVERY_OTHER)
    for end in jobs.read(reader).values():
        assert isinstance(end.error, ReadTimeoutError)
        assert not end.error.begun
        assert "no more are begun until one does" in str(end.error)
    assert time.monotonic() - begun < LIMIT / 2
    assert not jobs.late  # nothing was begun, so nobody has to wait with these buffers
    disk.answer()
    wait_until(lambda: all(one.over for one in late))
    jobs = Jobs(EVERY_OTHER)
    assert jobs.good(file, jobs.read(reader)) == EVERY_OTHER
    reader.close()


def test_a_buffer_that_nobody_takes_over_is_waited_for(disk: Disk, file: Path) -> None:
    reader = disk.open()
    disk.hang()
    jobs = [ReadJob(0, aligned_buffer(ROW), 0)]
    threading.Timer(3 * LIMIT, disk.answer).start()
    (end,) = reader.read(jobs)
    assert end.error is None
    assert jobs[0].buffer.tobytes() == file.read_bytes()[:ROW]
    reader.close()


def test_without_a_limit_reads_are_waited_for(disk: Disk, file: Path) -> None:
    reader = disk.open(None)
    disk.hang()
    jobs = Jobs([0, 4])
    threading.Timer(3 * LIMIT, disk.answer).start()
    assert jobs.good(file, jobs.read(reader)) == [0, 4]
    assert not jobs.late
    reader.close()


@pytest.mark.parametrize("leave", ["close", "throw"])
def test_leaving_early_does_not_wait_for_it(disk: Disk, leave: str) -> None:
    reader = disk.open(None)
    disk.hang(8 * ROW, 8 * ROW + 1)
    jobs = Jobs([0, 8])
    ends = reader.read(jobs.jobs, fresh=True)
    assert next(ends).tag == 0
    disk.asked()
    begun = time.monotonic()
    if leave == "close":
        ends.close()
    else:
        with pytest.raises(SystemExit):
            ends.throw(SystemExit())
    assert time.monotonic() - begun < GRACE + 2
    assert set(jobs.late) == {8}
    assert not jobs.late[8].over
    disk.answer()
    wait_until(lambda: jobs.late[8].over)
    reader.close()


def test_closing_does_not_wait_for_it(disk: Disk) -> None:
    reader = disk.open(None)
    disk.hang()
    jobs = Jobs([5])
    raised: list[BaseException] = []

    def read() -> None:
        try:
            list(reader.read(jobs.jobs))
        except ValueError as e:
            raised.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.2)
    begun = time.monotonic()
    reader.close()
    thread.join(30)
    assert time.monotonic() - begun < 4 * GRACE
    assert "closed" in str(raised[0])
    assert set(jobs.late) == {5}
    disk.answer()
    wait_until(lambda: jobs.late[5].over)


def test_a_wrapped_reader_hands_buffers_over_as_well(disk: Disk) -> None:
    rules = {"rules": [{"kind": "short", "tags": [2]}]}
    reader = FaultyReader(disk.open(), rules)
    disk.hang()
    jobs = Jobs([2, 9])
    ends = jobs.read(reader)
    assert [isinstance(ends[row].error, ReadTimeoutError) for row in (2, 9)] == [True, True]
    assert set(jobs.late) == {2, 9}
    disk.answer()
    wait_until(lambda: all(late.over for late in jobs.late.values()))
    reader.close()


LEAVES = """
import sys, time
from pathlib import Path
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.readers.base import ReadJob
from ziggurat.stores.readers.registry import open_reader
reader = open_reader(sys.argv[1], Path(sys.argv[2]), threads=2, timeout=0.3)
late = []
memory = aligned_buffer(4096)
assert [end.error for end in reader.read([ReadJob(0, memory, 0)])] == [None]
print("open", flush=True)
sys.stdin.readline()
print([type(end.error).__name__ for end in reader.read([ReadJob(8192, memory, 0, late.append)])], flush=True)
if sys.argv[3] == "close":
    reader.close()
"""


@pytest.mark.parametrize("last", ["close", "just end"])
@pytest.mark.parametrize("name", ["io_uring", "pread"])
def test_a_process_can_end(file: Path, tmp_path: Path, name: str, last: str) -> None:
    with hanging_disk(file.parent, tmp_path) as disk:
        if disk is None:
            pytest.skip("needs FUSE and the right to mount")
        command = [sys.executable, "-c", LEAVES, name, str(disk.folder / file.name), last]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            disk.freeze()  # a wait that cannot be killed keeps any process
            try:
                out, err = child.communicate("go on\n", timeout=30)
            finally:
                disk.answer()
        assert (child.returncode, out, err) == (0, "['ReadTimeoutError']\n", "")
