"""What the kernel may answer an io_uring read, and where io_uring is forbidden."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers import ring as io
from ziggurat.stores.readers import uring
from ziggurat.stores.readers.base import ReadJob
from ziggurat.stores.readers.uring import UringReader

PAGE = 4096
PAGES = 64
ROWS = 16
ROW = PAGE * PAGES // ROWS

needs_io_uring = pytest.mark.skipif(io.problem() is not None, reason=str(io.problem()))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("uring") / "file"
    path.write_bytes(os.urandom(PAGE * PAGES))
    return path


def jobs_for(rows: list[int]) -> list[ReadJob]:
    return [ReadJob(row * ROW, aligned_buffer(ROW), row) for row in rows]


def check(file: Path, jobs: list[ReadJob]) -> None:
    content = file.read_bytes()
    for job in jobs:
        assert job.buffer.tobytes() == content[job.offset : job.offset + ROW]


Results = Callable[[int, int], int]


def distort(monkeypatch: pytest.MonkeyPatch, change: Results) -> list[int]:
    """Have the ring's reads answered with change(offset, real result); returns the offsets read, in order."""
    offsets: dict[int, int] = {}
    order: list[int] = []
    push, reap = io.Ring.push, io.Ring.reap

    def pushed(ring: io.Ring, opcode: int, user_data: int, **rest: int) -> None:
        if opcode in (io.READ, io.READV, io.READ_FIXED):
            offsets[user_data] = rest["offset"]
            order.append(rest["offset"])
        push(ring, opcode, user_data, **rest)

    def reaped(ring: io.Ring) -> list[io.Completion]:
        return [
            found._replace(result=change(offsets[found.user_data], found.result))
            if found.user_data in offsets
            else found
            for found in reap(ring)
        ]

    monkeypatch.setattr(uring._EventRing, "push", pushed)
    monkeypatch.setattr(uring._EventRing, "reap", reaped)
    return order


@needs_io_uring
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_signal_beside_the_entry_of_a_read_loses_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its exception comes just before an entry is added, or just behind: buffers are the caller's again either way."""
    push = io.Ring.push
    pushed: list[int] = []

    def interrupted(ring: io.Ring, opcode: int, user_data: int, **rest: int) -> None:
        pushed.append(opcode)
        if pushed == [opcode] * 3 and when == "before":
            raise KeyboardInterrupt
        push(ring, opcode, user_data, **rest)
        if pushed == [opcode] * 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(uring._EventRing, "push", interrupted)
    reader = UringReader(file, threads=2)
    mine = jobs_for([1, 4, 7, 10])
    with pytest.raises(KeyboardInterrupt):
        list(reader.read(mine))
    monkeypatch.undo()
    for job in mine:
        job.buffer[:] = bytes(ROW)
    others = jobs_for([2, 5, 8, 11])
    assert [end.error for end in reader.read(others)] == [None] * 4
    reader.close()
    check(file, others)
    assert all(job.buffer.tobytes() == bytes(ROW) for job in mine), "nothing comes any more"


@needs_io_uring
@pytest.mark.parametrize("answer", [-errno.EINTR, -errno.EAGAIN, -errno.ECANCELED])
def test_an_answer_that_another_try_cures(file: Path, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    tries: dict[int, int] = {}

    def change(offset: int, result: int) -> int:
        tries[offset] = tries.get(offset, 0) + 1
        return answer if tries[offset] < 3 else result

    distort(monkeypatch, change)
    reader = UringReader(file, threads=2)
    jobs = jobs_for([3, 9, 1, 14])
    assert [end.error for end in reader.read(jobs)] == [None] * 4
    reader.close()
    check(file, jobs)
    assert set(tries.values()) == {3}


@needs_io_uring
@pytest.mark.parametrize("direct", ["auto", "never"])
def test_short_reads_go_on_where_they_stopped(
    file: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    # Of what arrived only a part is believed; the rest must come again.
    distort(monkeypatch, lambda _, result: min(result, 1000) if result > 0 else result)
    reader = UringReader(file, threads=2, direct=direct)  # type: ignore[arg-type]  # a parameter
    jobs = jobs_for(list(range(6)))
    arrived: list[int] = []
    ends = list(reader.read(jobs, lambda job: arrived.append(job.tag)))
    reader.close()
    assert [end.error for end in ends] == [None] * 6
    assert sorted(arrived) == list(range(6))
    check(file, jobs)


@needs_io_uring
@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.ESTALE])
def test_an_io_error_in_merged_rows_is_that_rows_error(
    file: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def change(offset: int, result: int) -> int:
        return -number if offset <= 4 * ROW < offset + max(result, 1) else result

    order = distort(monkeypatch, change)
    reader = UringReader(file, threads=2)
    jobs = jobs_for(list(range(ROWS)))
    ends = {end.tag: end for end in reader.read(jobs)}
    reader.close()
    assert order[0] == 0
    assert len(order) > 1  # first together, then one by one
    for row, end in ends.items():
        if row == 4:
            assert end.error is not None
            assert end.error.errno == number
        else:
            assert (end.error, end.nbytes) == (None, ROW)
    check(file, [job for job in jobs if job.tag != 4])


@needs_io_uring
def test_a_filesystem_that_refuses_direct_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def change(offset: int, result: int) -> int:
        if offset in seen:
            return result
        seen.add(offset)
        return -errno.EINVAL

    distort(monkeypatch, change)
    reader = UringReader(file, threads=2)
    jobs = jobs_for([2, 5])
    assert [end.error for end in reader.read(jobs)] == [None, None]
    reader.close()
    check(file, jobs)


@needs_io_uring
def test_neighbours_are_read_together_in_order_of_offset(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = distort(monkeypatch, lambda _, result: result)
    reader = UringReader(file, threads=2)
    jobs = jobs_for([12, 2, 7, 3, 1])  # 1 to 3 are neighbours, their buffers are not
    list(reader.read(jobs))
    check(file, jobs)
    assert order == [ROW, 7 * ROW, 12 * ROW]
    order.clear()
    memory = aligned_buffer(4 * ROW)
    jobs = [ReadJob((4 + i) * ROW, memory[i * ROW : (i + 1) * ROW], i) for i in range(4)]
    list(reader.read(jobs))
    reader.close()
    check(file, jobs)
    assert order == [4 * ROW]


@needs_io_uring
def test_bytes_under_way_are_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = 0, 0
    push, reap = io.Ring.push, io.Ring.reap

    def pushed(ring: io.Ring, opcode: int, user_data: int, **rest: int) -> None:
        nonlocal under_way, most
        under_way += opcode == io.READ
        most = max(most, under_way)
        push(ring, opcode, user_data, **rest)

    def reaped(ring: io.Ring) -> list[io.Completion]:
        nonlocal under_way
        found = reap(ring)
        under_way -= len(found)
        return found

    monkeypatch.setattr(uring._EventRing, "push", pushed)
    monkeypatch.setattr(uring._EventRing, "reap", reaped)
    reader = UringReader(file, threads=1, inflight_bytes=3 * ROW)
    jobs = jobs_for(list(range(0, ROWS, 2)))
    list(reader.read(jobs))
    reader.close()
    check(file, jobs)
    assert most == 3


@needs_io_uring
def test_registered_memory(file: Path) -> None:
    memory = aligned_buffer(ROWS * ROW)
    reader = UringReader(file, threads=1)
    if not reader.register_memory(memory):
        pytest.skip("locked memory is limited")
    jobs = [ReadJob(row * ROW, memory[i * ROW : (i + 1) * ROW], row) for i, row in enumerate([5, 0, 11, 8])]
    others = jobs_for([6])
    assert [end.error for end in reader.read([*jobs, *others])] == [None] * 5
    reader.close()
    check(file, [*jobs, *others])


@needs_io_uring
def test_closing_cancels_a_read_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    keep = os.open(fifo, os.O_RDWR)  # nobody writes, nobody closes
    waits = threading.Event()
    enter = io.Ring.enter

    def entered(ring: io.Ring, wait: bool) -> None:
        if wait:
            waits.set()
        enter(ring, wait)

    monkeypatch.setattr(uring._EventRing, "enter", entered)
    reader = UringReader(fifo, threads=1, direct="never")
    ends = reader.read([ReadJob(0, memoryview(bytearray(8)), 0)])
    raised: list[str] = []

    def read() -> None:
        try:
            next(ends)
        except ValueError as e:
            raised.append(str(e))

    waiting = threading.Thread(target=read)
    waiting.start()
    assert waits.wait(60)
    reader.close()
    waiting.join()
    os.close(keep)
    assert raised == [f"the reader of {fifo} is closed"]


@needs_io_uring
@pytest.mark.parametrize("call", range(1, 9))
def test_an_interrupt_between_a_system_call_and_its_booking(
    file: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """As a signal's exception may come after any of them: the read ends, and the next one is good."""
    real, calls = io._syscall, 0

    def interrupted(*arguments: object) -> int:
        nonlocal calls
        done = int(real(*arguments))
        if arguments[0] is io._ENTER:
            calls += 1
            if calls == call:
                raise KeyboardInterrupt
        return done

    reader = UringReader(file, depth=2)
    every_other = list(range(0, ROWS, 2))
    monkeypatch.setattr(io, "_syscall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in reader.read(jobs_for(every_other), lambda job: None):
            pass
    monkeypatch.setattr(io, "_syscall", real)
    again = jobs_for(every_other)
    assert all(end.error is None for end in reader.read(again))
    check(file, again)
    reader.close()


@needs_io_uring
def test_closing_while_another_read_is_half_done(file: Path) -> None:
    reader = UringReader(file, threads=1, depth=2)
    ends = reader.read(jobs_for(list(range(0, ROWS, 2))))
    next(ends)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        list(ends)


FORBIDDEN = r"""
import ctypes, logging, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
# seccomp: load the call's number; io_uring_setup answers the error in argv[2], everything else runs.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | int(sys.argv[2])), (0x06, 0, 0, 0x7FFF0000)]
raw = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(raw)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0, ctypes.get_errno()
from pathlib import Path
from ziggurat.stores.readers.registry import open_reader
from ziggurat.stores.readers.uring import UringReader
logging.basicConfig(format="%(message)s")
path = Path(sys.argv[1])
try:
    UringReader(path)
except Exception as e:
    print(type(e).__name__, e)
for name in ("auto", "io_uring"):
    print(open_reader(name, path).name, file=sys.stderr)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows x86-64's call numbers")
@pytest.mark.parametrize(
    ("number", "says"), [(errno.EPERM, "forbidden here"), (errno.ENOSYS, "this kernel has no io_uring")]
)
def test_where_io_uring_is_forbidden(file: Path, number: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(file), str(number)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ReaderError")
    assert says in done.stdout
    assert "set tiers.disk.reader to pread" in done.stdout
    first, warning, last = done.stderr.splitlines()
    assert (first, last) == ("pread", "pread")
    assert says in warning
    assert "by a pool of 8 threads instead" in warning


def test_bad_options(file: Path) -> None:
    with pytest.raises(ReaderError, match="at least one"):
        UringReader(file, threads=0)
    with pytest.raises(ReaderError, match="at least one"):
        UringReader(file, depth=0)
