"""The contract of readers, run over every reader and wrapper."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import ReadDone, Reader, ReadJob
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.registry import open_reader, reader_names
from ziggurat.stores.readers.uring import UringReader

SIZE = 5 * 4096 + 123  # not whole pages
PAGE = 4096

Make = Callable[[Path], Reader]


def one_byte_at_a_time(fd: int, buffers: list[memoryview], offset: int) -> int:
    """A kernel that returns at most 777 bytes a call."""
    return os.preadv(fd, [buffers[0][:777]], offset)


class Interrupting:
    """A kernel that is interrupted at every other call."""

    def __init__(self) -> None:
        self._calls = 0
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            self._calls += 1
            odd = self._calls % 2
        if odd:
            raise InterruptedError(errno.EINTR, "interrupted")
        return os.preadv(fd, buffers, offset)


def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
    """A filesystem that opens for direct I/O, then refuses reads."""
    import fcntl

    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.preadv(fd, buffers, offset)


READERS: dict[str, Make] = {
    "pread-buffered": lambda path: PreadReader(path, threads=3, direct="never"),
    "pread-auto": lambda path: PreadReader(path, threads=3, direct="auto"),
    "pread-one-thread": lambda path: PreadReader(path, threads=1),
    "pread-short": lambda path: PreadReader(path, threads=3, preadv=one_byte_at_a_time),
    "pread-interrupted": lambda path: PreadReader(path, threads=3, preadv=Interrupting()),
    "pread-refused-direct": lambda path: PreadReader(path, threads=3, preadv=refusing),
    "faults-none": lambda path: FaultyReader(PreadReader(path, threads=3), {}),
    "faults-other-tags": lambda path: FaultyReader(
        PreadReader(path, threads=3), {"rules": [{"kind": "error", "tags": [10**9]}]}
    ),
    "faults-delay": lambda path: FaultyReader(
        PreadReader(path, threads=3), {"rules": [{"kind": "delay", "seconds": 0.0}]}
    ),
    "faults-of-faults": lambda path: FaultyReader(FaultyReader(PreadReader(path), {}), {}),
    "io_uring-auto": lambda path: UringReader(path, threads=3),
    "io_uring-buffered": lambda path: UringReader(path, threads=3, direct="never"),
    "io_uring-one-at-a-time": lambda path: UringReader(path, threads=1, depth=1),
    "io_uring-few-bytes": lambda path: UringReader(path, threads=3, inflight_bytes=5000),
    "faults-io_uring": lambda path: FaultyReader(UringReader(path, threads=3), {}),
    "registry-auto": lambda path: open_reader("auto", path, threads=2),
    "registry": lambda path: open_reader("pread", path, threads=2, faults={}),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, file: Path) -> Iterator[Reader]:
    made = READERS[request.param](file)
    yield made
    made.close()


def jobs_for(pieces: list[tuple[int, int]]) -> list[ReadJob]:
    return [
        ReadJob(offset, memoryview(bytearray(b"\xaa" * length)), tag)
        for tag, (offset, length) in enumerate(pieces)
    ]


def check(file: Path, jobs: list[ReadJob], ends: list[ReadDone]) -> None:
    content = file.read_bytes()
    assert sorted(end.tag for end in ends) == sorted(job.tag for job in jobs)
    for end in ends:
        assert (end.error, end.seconds >= 0) == (None, True)
    for job in jobs:
        assert job.buffer.tobytes() == content[job.offset : job.offset + job.buffer.nbytes]


def test_reads_what_is_there(file: Path, reader: Reader) -> None:
    jobs = jobs_for([(0, SIZE), (0, 1), (SIZE - 1, 1), (4095, 2), (4096, 4096), (77, 9000)])
    ends = list(reader.read(jobs))
    check(file, jobs, ends)
    assert {end.tag: end.nbytes for end in ends} == {job.tag: job.buffer.nbytes for job in jobs}


def test_aligned_buffers(file: Path, reader: Reader) -> None:
    jobs = [ReadJob(page * PAGE, aligned_buffer(2 * PAGE), page) for page in range(4)]
    check(file, jobs, list(reader.read(jobs)))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
            lambda p: (p[0], min(p[1], SIZE - p[0]))
        ),
        max_size=40,
    )
)
def test_any_pieces(file: Path, reader: Reader, pieces: list[tuple[int, int]]) -> None:
    jobs = jobs_for(pieces)
    check(file, jobs, list(reader.read(jobs)))


def test_nothing_to_read(reader: Reader) -> None:
    assert list(reader.read([])) == []


def test_tags_need_not_differ(file: Path, reader: Reader) -> None:
    jobs = [job._replace(tag=7) for job in jobs_for([(0, 100), (100, 100)])]
    check(file, jobs, list(reader.read(jobs)))


def test_end_of_file_is_that_jobs_error(file: Path, reader: Reader) -> None:
    jobs = jobs_for([(0, 10), (SIZE - 10, 11), (SIZE + 5, 3), (10, 10)])
    ends = {end.tag: end for end in reader.read(jobs)}
    assert {tag for tag, end in ends.items() if end.error is None} == {0, 3}
    assert ends[1].nbytes == 10
    for tag in (1, 2):
        error = ends[tag].error
        assert error is not None
        assert error.errno == errno.EIO
        assert "the file ends" in str(error)
    check(file, [jobs[0], jobs[3]], [ends[0], ends[3]])


@pytest.mark.parametrize(
    "job",
    [
        ReadJob(-1, memoryview(bytearray(4)), 0),
        ReadJob(0, memoryview(b"read-only"), 0),
        ReadJob(0, memoryview(bytearray(0)), 0),
        ReadJob(0, memoryview(bytearray(8))[::2], 0),
    ],
)
def test_bad_jobs_are_refused_before_reading(reader: Reader, job: ReadJob) -> None:
    good = jobs_for([(0, 10)])[0]
    with pytest.raises(ValueError, match="job 0"):
        list(reader.read([good, job]))
    assert good.buffer.tobytes() == b"\xaa" * 10


def test_nothing_happens_before_the_first_step(reader: Reader) -> None:
    jobs = jobs_for([(0, 10)])
    reader.read(jobs).close()
    assert jobs[0].buffer.tobytes() == b"\xaa" * 10


def test_arrived_sees_the_bytes_before_the_end_is_reported(file: Path, reader: Reader) -> None:
    content = file.read_bytes()
    seen: list[int] = []

    def arrived(job: ReadJob) -> None:
        assert job.buffer.tobytes() == content[job.offset : job.offset + job.buffer.nbytes]
        assert threading.current_thread() is not threading.main_thread()
        seen.append(job.tag)

    jobs = jobs_for([(i * 50, 50) for i in range(30)] + [(SIZE, 5)])
    for end in reader.read(jobs, arrived):
        assert (end.tag in seen) == (end.error is None)
    assert sorted(seen) == list(range(30))


def test_what_arrived_raises_is_raised_after_all_reads_are_over(reader: Reader) -> None:
    running: set[int] = set()

    def arrived(job: ReadJob) -> None:
        running.add(job.tag)
        try:
            if job.tag == 3:
                raise ZeroDivisionError(job.tag)
        finally:
            running.discard(job.tag)

    with pytest.raises(ZeroDivisionError):
        list(reader.read(jobs_for([(i, 100) for i in range(20)]), arrived))
    assert not running


@pytest.mark.parametrize("leave", ["close", "throw"])
def test_leaving_early_waits_for_reads_in_progress(reader: Reader, leave: str) -> None:
    release, started = threading.Event(), threading.Event()
    active: set[int] = set()
    at_return: list[int] = []

    def arrived(job: ReadJob) -> None:
        if job.tag == 0:
            return
        active.add(job.tag)
        started.set()
        release.wait(60)
        active.discard(job.tag)

    ends = reader.read(jobs_for([(i, 100) for i in range(20)]), arrived)
    next(ends)

    def leave_early() -> None:
        if leave == "close":
            ends.close()
        else:
            with pytest.raises(KeyError):
                ends.throw(KeyError("consumer failed"))
        at_return.append(len(active))

    leaver = threading.Thread(target=leave_early)
    leaver.start()
    if started.wait(0.2):  # with one thread nothing else may have been started
        leaver.join(0.2)
        assert not at_return  # returned although reads were in progress
    release.set()
    leaver.join()
    assert at_return == [0]


def test_concurrent_callers(file: Path, reader: Reader) -> None:
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for _ in range(5):
                jobs = jobs_for([(((i + seed) * 997) % (SIZE - 300), 300) for i in range(25)])
                check(file, jobs, list(reader.read(jobs)))
        except BaseException as e:  # reported below
            failures.append(e)
            raise

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_closed_readers_refuse(file: Path, reader: Reader) -> None:
    unstarted = reader.read(jobs_for([(0, 1)]))
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        list(reader.read(jobs_for([(0, 1)])))
    with pytest.raises(ValueError, match="closed"):
        list(unstarted)


def test_in_flight_reads_are_bounded(file: Path) -> None:
    active, most = 0, 0
    lock = threading.Lock()
    enough = threading.Barrier(3)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        enough.wait(60)  # all three threads are in here at the same time
        with lock:
            active -= 1
        return os.preadv(fd, buffers, offset)

    reader = PreadReader(file, threads=3, preadv=preadv)
    jobs = jobs_for([(i, 10) for i in range(30)])
    check(file, jobs, list(reader.read(jobs)))
    reader.close()
    assert most == 3


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_io_error_is_that_jobs_error(file: Path, number: int) -> None:
    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 200:
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, buffers, offset)

    reader = PreadReader(file, threads=2, direct="never", preadv=preadv)
    ends = {end.tag: end for end in reader.read(jobs_for([(0, 10), (200, 10), (300, 10)]))}
    reader.close()
    assert [ends[tag].error is None for tag in range(3)] == [True, False, True]
    error = ends[1].error
    assert error is not None
    assert error.errno == number


def direct_or_skip(path: Path) -> PreadReader:
    try:
        return PreadReader(path, direct="always")
    except ReaderError:
        pytest.skip("the filesystem of the temporary folder takes no direct I/O")


def test_direct_always(file: Path) -> None:
    reader = direct_or_skip(file)
    assert reader.direct
    jobs = [ReadJob(page * PAGE, aligned_buffer(PAGE), page) for page in range(5)]
    check(file, jobs, list(reader.read(jobs)))
    for job in (
        ReadJob(1, aligned_buffer(PAGE), 0),
        ReadJob(0, aligned_buffer(PAGE)[:100], 0),
        ReadJob(0, aligned_buffer(2 * PAGE)[1 : PAGE + 1], 0),
    ):
        with pytest.raises(ValueError, match="multiples of 4096"):
            list(reader.read([job]))
    reader.close()


def test_direct_reads_bypass_the_buffered_descriptor(file: Path) -> None:
    direct_or_skip(file).close()
    flags: set[tuple[int, bool]] = set()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        import fcntl

        flags.add((offset, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return os.preadv(fd, buffers, offset)

    reader = PreadReader(file, direct="auto", preadv=preadv)
    list(reader.read([ReadJob(0, aligned_buffer(PAGE), 0), ReadJob(8192, memoryview(bytearray(5)), 1)]))
    reader.close()
    assert flags == {(0, True), (8192, False)}


def test_a_filesystem_without_direct_io() -> None:
    path = Path("/proc/self/status")  # procfs opens no file for direct I/O
    with pytest.raises(ReaderError, match=r"does not take direct I/O; set tiers\.disk\.direct"):
        PreadReader(path, direct="always")
    reader = PreadReader(path, direct="auto")
    assert not reader.direct
    (end,) = reader.read([ReadJob(0, memoryview(bytearray(5)), 0)])
    reader.close()
    assert end.error is None


def test_registry(file: Path) -> None:
    assert reader_names() == ("auto", "io_uring", "pread")
    with pytest.raises(ReaderError, match="unknown reader 'prad'; did you mean 'pread'"):
        open_reader("prad", file)
    with pytest.raises(ReaderError, match="cannot be opened: No such file"):
        open_reader("pread", file.with_name("absent"))
    with pytest.raises(ReaderError, match="at least one thread"):
        open_reader("pread", file, threads=0)
    with pytest.raises(ReaderError, match="direct is 'yes'"):
        open_reader("pread", file, direct="yes")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ReaderError, match="kind must be"):
        open_reader("pread", file, faults={"rules": [{"kind": "explode"}]})


def test_auto_reads_through_the_page_cache_by_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(1 << 16))
    reader = open_reader("auto", path, direct="never")
    try:
        assert isinstance(reader, PreadReader)
    finally:
        reader.close()
