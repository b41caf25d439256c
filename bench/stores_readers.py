"""How fast rows come from a disk: this project's readers against fio on the same file, alternating in one run.

    python bench/stores_readers.py [--folder DIR] [--gib 4] [--rounds 7] [--output FILE]

fio is Debian's (`apt-get install fio`), engine io_uring. Each round runs fio and every reader once on the same file
with the same block size, depth and direct flag, in an order that rotates; the share of fio is the median over rounds of
the ratio within a round, since the rate of a shared disk drifts. CPU seconds are user and system time of the whole
process per GiB read. The first seconds of each run are not counted, in any program. Buffered runs begin with the file's
pages dropped.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.results_io import RESULTS, provenance, read_json, write_json
from ziggurat.stores.packformat import row_digest
from ziggurat.stores.readers.base import DirectMode, Reader, ReadJob
from ziggurat.stores.readers.pread import PreadReader
from ziggurat.stores.readers.uring import UringReader

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LARGE, SMALL = 6912 * KIB, 64 * KIB
ARENA_BYTES = GIB
BATCH_BYTES = 4 * GIB  # of one `read`: at its ends fewer reads are under way, which fio has once a run
# Not counted: a disk with a budget (any virtual one) lets what was left unused before go first, at any rate.
RAMP_SECONDS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """row: bytes. depth: reads under way. layer: rows of a layer, where whole layers are read in order, or 0."""

    name: str
    row: int
    depth: int
    layer: int
    direct: bool
    goal: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Bytes read, seconds by the clock, CPU seconds."""

    nbytes: int
    wall: float
    cpu: float


CASES = (
    Case("scattered 6.75 MiB rows", LARGE, 8, 0, True, 0.95),
    Case("scattered 64 KiB rows", SMALL, 32, 0, True, 0.95),
    Case("whole layers of 6.75 MiB rows", LARGE, 8, 64, True, 0.97),
    Case("whole layers of 64 KiB rows", SMALL, 32, 256, True, 0.97),
    Case("scattered 6.75 MiB rows, buffered", LARGE, 8, 0, False, 0.95),
    Case("scattered 64 KiB rows, buffered", SMALL, 32, 0, False, 0.95),
)


def fio(case: Case, path: Path, seconds: float) -> Spent:
    """One run of fio."""
    command = [
        "fio", "--name=rows", f"--filename={path}", f"--size={path.stat().st_size}", "--time_based",
        f"--runtime={seconds}", f"--ramp_time={RAMP_SECONDS}", f"--rw={'read' if case.layer else 'randread'}",
        f"--bs={case.row}", f"--iodepth={case.depth}", f"--direct={int(case.direct)}", "--ioengine=io_uring",
        "--output-format=json", "--randrepeat=0", "--iomem_align=2M",
    ]  # fmt: skip
    # Its memory in huge pages, as ours: pinning 4 KiB pages costs several times the CPU time. Without alignment two
    # megabytes of it, 32 rows of 64 KiB, are in none.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Spent(job["read"]["io_bytes"], job["read"]["runtime"] / 1e3, cpu)


def ours(
    case: Case, reader: Reader, path: Path, seconds: float, arena: memoryview, *, digest: bool = False
) -> Spent:
    """One run of a reader: rows into places of an arena, in turn; BATCH_BYTES of them in a `read`."""
    places = len(arena) // case.row
    batch_rows = BATCH_BYTES // case.row
    arrived: Callable[[ReadJob], None] | None = None
    if digest:

        def arrived(job: ReadJob) -> None:
            row_digest(job.buffer)

    began = time.perf_counter()
    counted, since, cpu = 0, 0.0, 0.0
    for batch in _batches(case, path.stat().st_size // case.row, batch_rows):
        if not case.direct:
            _forget(path)  # as fio does each time that it comes to the end of the file
        jobs = [
            ReadJob(row * case.row, arena[i % places * case.row : (i % places + 1) * case.row], row)
            for i, row in enumerate(batch)
        ]
        with closing(reader.read(jobs, arrived)) as ends:
            for end in ends:
                if end.error is not None:
                    raise end.error
                counted += end.nbytes
                now = time.perf_counter()
                if not since:
                    if now - began >= RAMP_SECONDS:
                        counted, since, cpu = 0, now, _cpu()
                elif now - since >= seconds:
                    return Spent(counted, now - since, _cpu() - cpu)
    raise AssertionError("batches have no end")


def _batches(case: Case, rows: int, most: int) -> Iterator[Sequence[int]]:
    """Row numbers of one `read` after another: several whole layers, or rows at random, each of the file's once."""
    while True:
        if case.layer:
            count = min(most, rows) // case.layer * case.layer
            yield from (range(at, at + count) for at in range(0, rows - count + 1, count))
        else:
            order = random.sample(range(rows), rows)
            yield from (order[at : at + most] for at in range(0, rows, most))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(
    case: Case, path: Path, seconds: float, rounds: int, arena: memoryview, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Medians of one case. only: names of readers, besides fio; none: all."""
    mode: DirectMode = "always" if case.direct else "never"
    uring = UringReader(path, direct=mode, depth=case.depth)
    fixed = UringReader(path, direct=mode, depth=case.depth)
    registered = fixed.register_memory(arena)
    pread = PreadReader(path, threads=case.depth, direct=mode)
    few = arena[: case.depth * case.row]  # as much memory as fio reads into, over and over
    runs: dict[str, Callable[[], Spent]] = {
        "fio": lambda: fio(case, path, seconds),
        "io_uring": lambda: ours(case, uring, path, seconds, few),
        "pread": lambda: ours(case, pread, path, seconds, few),
        "io_uring, checksums": lambda: ours(case, uring, path, seconds, few, digest=True),
        "io_uring, arena of 1 GiB": lambda: ours(case, uring, path, seconds, arena),
    }
    if registered:
        runs["io_uring, registered arena of 1 GiB"] = lambda: ours(case, fixed, path, seconds, arena)
    names = [name for name in runs if not only or name == "fio" or name in only]
    found: dict[str, list[Spent]] = {name: [] for name in names}
    try:
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                _forget(path)
                found[name].append(runs[name]())
    finally:
        for reader in (uring, fixed, pread):
            reader.close()
    return {
        "case": case.name,
        "row_bytes": case.row,
        "depth": case.depth,
        "direct": case.direct,
        "goal": case.goal,
        "runs": {name: _record(spent, found["fio"]) for name, spent in found.items()},
    }


def _record(spent: Sequence[Spent], of_fio: Sequence[Spent]) -> dict[str, float]:
    rates = [one.nbytes / one.wall for one in spent]
    ratios = [rate / (one.nbytes / one.wall) for rate, one in zip(rates, of_fio, strict=True)]
    return {
        "mb_per_s": round(statistics.median(rates) / 1e6, 1),
        "best_mb_per_s": round(max(rates) / 1e6, 1),
        "share_of_fio": round(statistics.median(ratios), 3),
        "cpu_s_per_gib": round(statistics.median(one.cpu / one.nbytes * GIB for one in spent), 3),
    }


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _make_file(path: Path, nbytes: int) -> None:
    piece = random.randbytes(16 * MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())


def main(arguments: Sequence[str]) -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the file")
    parser.add_argument("--seconds", type=float, default=2.0, help="that are counted of one run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument(
        "--readers", nargs="+", default=(), help="beside fio, by the names in the result; default: all"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "stores.json")
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    mapping = mmap.mmap(-1, ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)  # as the host tier's arena, and as fio's memory
    arena = memoryview(mapping)
    for at in range(0, len(arena), 4096):
        arena[at] = 1
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ziggurat-rows-", dir=options.folder) as folder:
        path = Path(folder) / "rows"
        _make_file(path, int(options.gib * GIB) // (16 * MIB) * 16 * MIB)
        cases = []
        for case in CASES:
            if options.only not in case.name:
                continue
            cases.append(measure(case, path, options.seconds, options.rounds, arena, options.readers))
            for name, run in cases[-1]["runs"].items():
                print(
                    f"{case.name}: {name}: {run['mb_per_s']:.0f} MB/s, {run['share_of_fio']:.3f} of fio, "
                    f"{run['cpu_s_per_gib']:.3f} CPU s/GiB",
                    flush=True,
                )
    record = {
        **provenance(["bench/stores_readers.py", *arguments], at=options.commit),
        "fio": subprocess.run(
            ["fio", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "file_gib": options.gib,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cases": cases,
    }
    write_json(options.output, {**read_json(options.output), "readers": record})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
