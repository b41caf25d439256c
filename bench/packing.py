"""Packing at the limit: whole builds beside reading, quantizing and writing alone, to bench/results/packing.json.

    python bench/packing.py [--gib 8] [--device auto|cpu|cuda:0] [--run bf16:w2 …] [--tp N] [--side 12]

The checkpoint is synthetic: the demo model's 32 experts a layer, each side of an expert 12 times as long, and as many
layers as make the size. Every job runs in the same lanes (threads or processes) as a build, after the files' pages
were dropped from the page cache, and counts the starting of processes too. The smallest of the three rates is what a
build could reach if its parts did not disturb each other. Memory: the largest sum over the processes that was seen in a
build of its own, looking twenty times a second, beside the bound that `ziggurat plan` prints.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.packing_alone import ALONE, PARTS  # noqa: E402
from bench.results_io import provenance, results_folder, write_json  # noqa: E402
from bench.synthetic import write_experts  # noqa: E402
from ziggurat.integration.packing import PackingPlan, plan_packing  # noqa: E402
from ziggurat.residency.config import TiersConfig  # noqa: E402
from ziggurat.stores.builder import build_pack, expected_header  # noqa: E402
from ziggurat.stores.buildfile import BuildFile  # noqa: E402
from ziggurat.stores.checkpoint import Checkpoint  # noqa: E402
from ziggurat.stores.chunks import Lane  # noqa: E402
from ziggurat.stores.filling import fill  # noqa: E402
from ziggurat.stores.progress import NoProgress  # noqa: E402

RESULT = "packing.json"
RUNS = ("bf16:w2", "bf16:fp4", "bf16:bf16", "fp8_block:w2", "fp8_block:fp4")
EXPERTS, HIDDEN, INTERMEDIATE = 32, 256, 128  # of the demo model
_DISTINCT = 4


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    origin = provenance(["bench/packing.py", *arguments], at=options.commit)
    before = os.getloadavg()[0]
    runs = []
    for source in dict.fromkeys(run.split(":")[0] for run in options.runs):
        with tempfile.TemporaryDirectory(prefix="ziggurat-packing-", dir=options.folder) as work:
            model = Path(work) / "model"
            hidden, intermediate = HIDDEN * options.side, INTERMEDIATE * options.side
            layer = 3 * hidden * intermediate * EXPERTS * (2 if source == "bf16" else 1)
            layers = math.ceil(options.gib * 2**30 / layer)
            nbytes = write_experts(
                model,
                source,
                layers,
                EXPERTS,
                hidden=hidden,
                intermediate=intermediate,
                distinct=_DISTINCT,
            )
            for codec in (run.split(":")[1] for run in options.runs if run.startswith(f"{source}:")):
                runs.append(_measure(model, source, codec, nbytes, Path(work), options))
                print(_line(runs[-1]), flush=True)
    result = {
        "what": "packing a checkpoint, GB (10^9 source bytes) a second",
        "experts_per_layer": EXPERTS,
        "hidden": HIDDEN * options.side,
        "intermediate": INTERMEDIATE * options.side,
        "repeats": options.repeats,
        "runs": runs,
        "load": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
        **origin,
    }
    on_gpu = any(run["device"] != "cpu" for run in runs)
    path = options.output or results_folder(origin["machine"].get("gpu") if on_gpu else None) / RESULT
    write_json(path, result)
    print(f"written: {path.name}")
    return 0


def _measure(
    model: Path, source: str, codec: str, nbytes: int, work: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """One source and codec: each repetition runs every job in turn; the fastest of each counts."""
    tiers = TiersConfig.from_mapping(
        {"tiers": {"disk": {"path": str(work / "packs")}}, "codecs": {"base": codec}}
    )
    seconds: dict[str, list[float]] = {name: [] for name in (*PARTS, "pack")}
    with Checkpoint.open(model) as checkpoint:
        plan = plan_packing(checkpoint, tiers, options.tp, options.device)
        for _ in range(options.repeats):
            for name, lane in PARTS.items():
                _drop(model)
                seconds[name].append(_alone(checkpoint, plan, lane, work, options.tp))
            _drop(model)
            seconds["pack"].append(_build(checkpoint, plan, work, options.tp))
        # In a build of its own: looking takes a tenth of a second of processor time for every half second.
        _drop(model)
        with _watched() as most:
            _build(checkpoint, plan, work, options.tp)
            peak = most()
    rates = {name: nbytes / min(found) / 1e9 for name, found in seconds.items()}
    slowest = min(ALONE, key=lambda name: rates[name])
    return {
        "source": source,
        "codec": codec,
        "source_bytes": nbytes,
        "tp": options.tp,
        "device": plan.encoder.device,
        "lanes": plan.lanes,
        "processes": plan.processes,
        "gb_per_s": {name: round(rate, 3) for name, rate in rates.items()},
        "seconds": {name: [round(one, 2) for one in found] for name, found in seconds.items()},
        "slowest": slowest,
        "of_slowest": round(rates["pack"] / rates[slowest], 3),
        "of_copy_or_quantize": round(rates["pack"] / min(rates["copy"], rates["quantize"]), 3),
        "peak_mib": round(peak / 2**20),
        "bound_mib": round(plan.peak_bytes / 2**20),
    }


def _build(checkpoint: Checkpoint, plan: PackingPlan, work: Path, tp: int) -> float:
    """Seconds that a whole build takes, to packs that are then thrown away."""
    with tempfile.TemporaryDirectory(prefix="packs-", dir=work) as packs:
        started = time.perf_counter()
        build_pack(checkpoint, plan.encoder, Path(packs), tp, lanes=plan.lanes, processes=plan.processes)
        return time.perf_counter() - started


def _alone(checkpoint: Checkpoint, plan: PackingPlan, lane: type[Lane], work: Path, tp: int) -> float:
    """Seconds that one part of the work takes, to files that are then thrown away."""
    headers = [expected_header(checkpoint, plan.encoder, rank, tp) for rank in range(tp)]
    with tempfile.TemporaryDirectory(prefix="alone-", dir=work) as folder:
        files = [BuildFile(Path(folder), header, resume=False) for header in headers]
        try:
            started = time.perf_counter()
            fill(
                checkpoint,
                plan.encoder,
                files,
                NoProgress(),
                plan.lanes,
                processes=plan.processes,
                lane=lane,
            )
            return time.perf_counter() - started
        finally:
            for file in files:
                file.close(discard=True)


def _drop(folder: Path) -> None:
    """Have the page cache forget the files of a folder."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextmanager
def _watched() -> Iterator[Callable[[], int]]:
    """How much more memory than at the start this process and its children took at most, in bytes so far.

    Shared memory counts by share (PSS).
    """
    me = psutil.Process()
    start, most = _taken(me), 0
    ended = threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.05):
            most = max(most, _taken(me) - start)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield lambda: most
    finally:
        ended.set()
        watcher.join()


def _taken(me: psutil.Process) -> int:
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


def _line(run: dict[str, Any]) -> str:
    rates = run["gb_per_s"]
    alone = ", ".join(f"{name} {rates[name]:.2f}" for name in PARTS)
    return (
        f"{run['source']} to {run['codec']} on {run['device']}: {rates['pack']:.2f} GB/s, {run['of_slowest']:.2f} of "
        f"{run['slowest']}, {run['of_copy_or_quantize']:.2f} of copy or quantize (alone: {alone}); "
        f"{run['peak_mib']} MiB of at most {run['bound_mib']}"
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Packing beside reading, quantizing and writing alone.")
    parser.add_argument("--gib", type=float, default=8.0, help="size of each synthetic checkpoint")
    parser.add_argument("--device", default="auto", help="what quantizes: auto, cpu or cuda:N")
    parser.add_argument(
        "--run", dest="runs", action="append", choices=RUNS, help="source:codec; default: all"
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks, all written in one pass")
    parser.add_argument("--repeats", type=int, default=2, help="the fastest counts")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where checkpoints and packs go for the while"
    )
    parser.add_argument("--side", type=int, default=12, help="how many times as long an expert's sides are")
    parser.add_argument("--output", type=Path, default=None, help="the result file")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    options.runs = options.runs or list(RUNS)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
