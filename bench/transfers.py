"""How fast rows get from locked host memory to a GPU, by every mover, against the link's peak in the same run.

    python bench/transfers.py [--commit HASH] [--output FILE] [--pin-gib N] [--repeats N] [--seconds N]

Writes bench/results/h200/transfers.json. Rows of each size, scattered over the arena, by single copies, by one batch
of copies and by the gather kernel; and how long locking the arena takes, beside `torch.empty(pin_memory=True)`. GB are
10^9 bytes. Every number is the median of `repeats`, which alternate between movers and the large copy that is the peak.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.results_io import RESULTS, provenance, write_json  # noqa: E402

RESULT = RESULTS / "h200" / "transfers.json"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# 6.75 and 10.125 MiB are 2-bit rows of DeepSeek-V4-Flash and GLM-5.2, 2.25 MiB those of the former over three ranks.
ROW_BYTES = (64 * KIB, 256 * KIB, MIB, 2304 * KIB, 6912 * KIB, 10368 * KIB, 12 * MIB)
ROW_COUNTS = (1, 4, 16, 64)
MOST = max(ROW_BYTES) * max(ROW_COUNTS)
STEADY_SECONDS = 5e-3
STEADY_CALLS = 256  # the driver's queue takes about a thousand launches before a call blocks
BATCHED, GATHER, SINGLE = "batched", "gather", "single"


class Link(Protocol):
    """What is measured: movers over one arena and one device buffer."""

    @property
    def movers(self) -> Sequence[str]: ...

    def peak(self) -> tuple[int, float]:
        """Bytes and seconds of one large copy."""

    def move(self, mover: str, row_bytes: int, rows: int, calls: int) -> float:
        """Seconds on the device from before the first of `calls` calls, enqueued one after the other, to their end."""


def measure(
    link: Link,
    repeats: int,
    left: Callable[[], float],
    tell: Callable[[str], None],
    *,
    sizes: Sequence[int] = ROW_BYTES,
    counts: Sequence[int] = ROW_COUNTS,
) -> dict[str, Any]:
    """A record for each row size, number of rows and mover; stops early when no second is left, and says so.

    gb_per_s: one call on an idle stream, the host's work for it included, as a step that waits for rows sees it.
    steady_gb_per_s: calls back to back. ratio, steady_ratio: of the peak that was measured between the same repeats.
    """
    runs: list[dict[str, Any]] = []
    peaks: list[float] = []
    skipped = 0
    link.peak()
    for row_bytes in sizes:
        for rows in counts:
            if left() <= 0:
                skipped += len(link.movers)
                continue
            found, here = _configuration(link, row_bytes, rows, repeats)
            runs += found
            peaks.append(here)
            tell(_line(row_bytes, rows, here, found))
    return {
        "peak_gb_per_s": round(median(peaks), 2) if peaks else None,
        "repeats": repeats,
        "skipped": skipped,
        "runs": runs,
        "crossover": crossover(runs, sizes),
        "goals": goals(runs),
    }


def _configuration(link: Link, row_bytes: int, rows: int, repeats: int) -> tuple[list[dict[str, Any]], float]:
    nbytes = row_bytes * rows
    peaks: list[float] = []
    once: dict[str, list[float]] = {name: [] for name in link.movers}
    steady: dict[str, list[float]] = {name: [] for name in link.movers}
    for name in link.movers:
        link.move(name, row_bytes, rows, 1)
    for _ in range(repeats):
        count, seconds = link.peak()
        peaks.append(count / seconds / 1e9)
        calls = max(1, min(STEADY_CALLS, round(STEADY_SECONDS / (nbytes / count * seconds))))
        for name in link.movers:
            once[name].append(nbytes / link.move(name, row_bytes, rows, 1) / 1e9)
            steady[name].append(nbytes * calls / link.move(name, row_bytes, rows, calls) / 1e9)
    peak = median(peaks)
    records = [
        {
            "row_bytes": row_bytes,
            "rows": rows,
            "mover": name,
            "gb_per_s": round(median(once[name]), 2),
            "steady_gb_per_s": round(median(steady[name]), 2),
            "ratio": round(median(once[name]) / peak, 3),
            "steady_ratio": round(median(steady[name]) / peak, 3),
        }
        for name in link.movers
    ]
    return records, peak


def crossover(runs: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """The row size from which on the batch is at least as fast as the gather kernel, over batches of 4 rows and more.

    The mean is geometric, of both ratios of every count of rows. `gather_below_bytes` is None without both movers.
    """
    by_size: dict[int, float] = {}
    for row_bytes in sizes:
        found = {
            name: [
                float(run[key])
                for run in runs
                if run["mover"] == name and run["row_bytes"] == row_bytes and run["rows"] >= 4
                for key in ("ratio", "steady_ratio")
            ]
            for name in (BATCHED, GATHER)
        }
        if all(found.values()):
            by_size[row_bytes] = geometric_mean(found[BATCHED]) / geometric_mean(found[GATHER])
    below: int | None = None
    if by_size:
        slower = [row_bytes for row_bytes, ratio in by_size.items() if ratio < 1]
        larger = [row_bytes for row_bytes in by_size if not slower or row_bytes > max(slower)]
        below = min(larger) if larger else max(by_size) + 1
        if not slower:
            below = 0
    return {
        "gather_below_bytes": below,
        "batched_to_gather": {str(size): round(one, 3) for size, one in by_size.items()},
    }


def goals(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best mover's shares of the peak that the project set itself: rows of 1 MiB and more, and 64 of 64 KiB."""

    def best(row_bytes: int, rows: int, key: str) -> float | None:
        found = [run[key] for run in runs if (run["row_bytes"], run["rows"]) == (row_bytes, rows)]
        return max(found, default=None)

    large = sorted({run["row_bytes"] for run in runs if run["row_bytes"] >= MIB})
    return {
        key: {
            "rows_of_64_kib_64": best(64 * KIB, 64, key),
            "rows_from_1_mib_16_least": min(
                (one for size in large if (one := best(size, 16, key)) is not None), default=None
            ),
            "rows_from_1_mib_64_least": min(
                (one for size in large if (one := best(size, 64, key)) is not None), default=None
            ),
        }
        for key in ("ratio", "steady_ratio")
    }


def _line(row_bytes: int, rows: int, peak: float, found: Sequence[Mapping[str, Any]]) -> str:
    speeds = ", ".join(
        f"{one['mover']} {one['gb_per_s']:.1f} ({one['steady_gb_per_s']:.1f} steady)" for one in found
    )
    return f"{rows:2d} rows of {row_bytes / KIB:7.0f} KiB: {speeds}; peak {peak:.1f} GB/s"


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    began = time.monotonic()
    faulthandler.dump_traceback_later(options.seconds + 30, exit=True)  # nothing here may hang a lent machine

    def tell(line: str) -> None:
        print(line, flush=True)

    from bench.transfers_cuda import CudaLink, gpu_facts, pinning

    pinned, arena = pinning(options.pin_gib * GIB, tell)
    with CudaLink(arena, MOST, tell) as link:
        link.check()
        measured = measure(link, options.repeats, lambda: options.seconds - (time.monotonic() - began), tell)
        result = {
            "what": "rows from locked host memory to the GPU: GB (10^9 bytes) a second by mover, and the link's peak",
            **provenance(["bench/transfers.py", *_lasting(arguments)], at=options.commit),
            "gpu": gpu_facts(),
            "pinning": pinned,
            "transfers": measured,
            "seconds": round(time.monotonic() - began, 1),
        }
    write_json(options.output, result)
    tell(f"crossover: {measured['crossover']}")
    tell(f"goals: {measured['goals']}")
    tell(f"written: {options.output.name} after {result['seconds']} s")
    return 0


def _lasting(arguments: Sequence[str]) -> list[str]:
    """The arguments that change what is measured."""
    kept: list[str] = []
    skip = False
    for one in arguments:
        if skip or one.startswith(("--commit", "--output")):
            skip = not skip and one in ("--commit", "--output")
            continue
        kept.append(one)
    return kept


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", help="the commit that is measured, where the tree came without git")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--pin-gib", type=int, default=8, help="size of the arena, at least 2")
    parser.add_argument("--repeats", type=int, default=9, help="at least 7")
    parser.add_argument("--seconds", type=float, default=55.0, help="start no new configuration after that")
    options = parser.parse_args(arguments)
    if options.pin_gib < 2 or options.repeats < 7:
        parser.error("--pin-gib is at least 2, --repeats at least 7")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
