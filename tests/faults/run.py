"""The long versions of the fault suite: `python tests/faults/run.py [SUITE…] [--count N] [--seed S]`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from faults import arenas, builds, flips, headers, reads  # noqa: E402

from bench.results_io import RESULTS, provenance, read_json, write_json  # noqa: E402

SUITES: dict[str, tuple[Callable[[int, int, Path], dict[str, object]], int]] = {
    "builds": (builds.run, 1000),
    "faulty-builds": (lambda seed, count, work: builds.run(seed, count, work, builds.KINDS), 1000),
    "reads": (reads.run, 3000),
    "flips": (flips.run, 10_000),
    "headers": (headers.run, 10_000),
    "arenas": (arenas.run, 200),
}


def main(arguments: Sequence[str]) -> int:
    """Run suites and write their counts. Status 1, and nothing written for it, if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"{', '.join(SUITES)}; default: all")
    parser.add_argument(
        "--count", type=int, help="default: 1 000 builds, 3 000 reads, 10 000 flips and headers, 200 kills"
    )
    parser.add_argument("--seed", type=int, help="default: from the clock, printed")
    parser.add_argument("--output", type=Path, default=RESULTS / "faults.json")
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # what is done on purpose is no news
    seed = int(time.time()) if options.seed is None else options.seed
    failed = False
    for name in options.suites or SUITES:
        suite, usual = SUITES[name]
        print(f"{name}: seed {seed}", flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="ziggurat-faults-", dir=options.folder) as work:
            try:
                found = suite(seed, options.count or usual, Path(work))
            except AssertionError as e:
                print(f"{name}: FAILED with seed {seed}: {e}", flush=True)
                failed = True
                continue
        origin = provenance(["tests/faults/run.py", *arguments], at=options.commit)
        record = {**origin, **found, "seconds": round(time.perf_counter() - start, 1)}
        write_json(options.output, {**read_json(options.output), name: record})
        print(f"{name}: {found}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
