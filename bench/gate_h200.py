"""The identity gate on a GPU: pools of any size give the all-resident pool's logits, bit for bit, under CUDA graphs.

    python bench/gate_h200.py [PART ...] [--out FOLDER] [--together] [--cpu]

Parts: full, piecewise, eager, small, inline, ahead, inline-disk, serve; each is one engine start (serve: two servers).
A part is ended when it takes longer than its limit, and the others go on. --together: several engines share the GPU,
which takes less time and, where engines disturbed each other, would show it. One engine compares pools of several sizes
under the same captured graphs: its pool has a slot for every expert and is told how many of them to use. `small`
allocates a quarter and compares with what `full` has written; so do `inline`, whose layers fetch their own rows from an
arena that has all, `ahead`, where they also fetch what the next layer is likely to want, and `inline-disk`, whose arena
has a third and which runs fewer batches. Prints a table, writes FOLDER/gate.json; status 0 if everything is as it must
be. --cpu: a short run with the CPU as the device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.gate_engine import MARK, jobs  # noqa: E402
from bench.results_io import provenance  # noqa: E402

_running: set[int] = set()  # process groups

LIMITS = {"full": 200.0, "piecewise": 170.0, "eager": 150.0, "small": 120.0, "serve": 260.0}
LIMITS |= {"inline": 200.0, "ahead": 120.0, "inline-disk": 240.0}
_AFTER_FULL = ("small", "inline", "ahead", "inline-disk")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(LIMITS), help=f"of {', '.join(LIMITS)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "bench/h200/out")))
    parser.add_argument("--cpu", action="store_true", help="a short run with the CPU as the device")
    parser.add_argument("--together", action="store_true", help="all parts at once, some after `full`")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(LIMITS))
    if unknown:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(LIMITS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="ziggurat-gate-") as folder:
        # These read what `full` wrote.
        chains = [[one for one in options.parts if one in ("full", *_AFTER_FULL)]]
        chains += [[one] for one in options.parts if one not in chains[0]]
        if not options.together:
            chains = [list(options.parts)]
        with ThreadPoolExecutor(len(chains)) as pool:
            chained = [pool.submit(_chain, names, options, Path(folder)) for names in chains]
            found = {result["part"]: result for one in chained for result in one.result()}
        results = [found[name] for name in options.parts]
    _show(results)
    report = {
        "passed": all(r["passed"] for r in results),
        "parts": results,
        **provenance(sys.argv, at=options.commit),
    }
    (options.out / "gate.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["passed"] else 1


def _stop(number: int, frame: object) -> None:
    """Engines are not left behind on the GPU, where they would disturb what is measured next."""
    for group in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(128 + number)


def _chain(names: list[str], options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Parts one after the other."""
    return [_part(name, options, work) for name in names]


def _part(name: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run one part in a process of its own and say what it found."""
    begun = time.monotonic()
    log = options.out / f"gate-{name}.log"
    if name == "serve":
        command = [sys.executable, str(ROOT / "bench" / "demo.py"), *([] if options.cpu else ["--gpu"])]
    else:
        job = work / f"{name}.json"
        job.write_text(json.dumps(jobs(work, cpu=options.cpu)[name].to_json()), encoding="utf-8")
        command = [sys.executable, str(ROOT / "bench" / "gate_engine.py"), str(job)]
    print(f"== {name}", flush=True)
    status, output = _run(command, log, LIMITS[name] * (4 if options.cpu else 2 if options.together else 1))
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    problems = [f"{line['case']}, {line['workload']}: {one}" for line in lines for one in line["problems"]]
    if status != 0:
        problems.append("took too long" if status is None else f"ended with status {status}")
    passed = status == 0 and not problems
    if not passed:
        print(f"-- the end of {log.name}", *output.splitlines()[-40:], sep="\n", flush=True)
    elif name == "serve":
        print(*[line for line in output.splitlines() if "identical" in line], sep="\n", flush=True)
    seconds = round(time.monotonic() - begun, 1)
    return {"part": name, "passed": passed, "seconds": seconds, "problems": problems, "runs": lines}


def _run(command: list[str], log: Path, limit: float) -> tuple[int | None, str]:
    """Status (None: it took too long) and output of a command, whose process group is ended with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process.pid)
        status: int | None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    _running.discard(process.pid)
    return status, log.read_text(encoding="utf-8", errors="replace")


def _environment() -> dict[str, str]:
    """This process's environment, for an engine in the child's own process."""
    from ziggurat.integration.determinism.environment import offline_environment

    return {**offline_environment(), "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}


def _show(results: list[dict[str, Any]]) -> None:
    print(
        f"\n{'part':10} {'case':34} {'batches':>7} {'steps':>6} {'passes':>6} {'missed':>7}  outcomes",
        flush=True,
    )
    for result in results:
        cases: dict[str, list[dict[str, Any]]] = {}
        for line in result["runs"]:
            cases.setdefault(line["case"], []).append(line)
        for case, lines in cases.items():
            outcomes: dict[str, int] = {}
            for line in lines:
                for outcome, count in line["outcomes"].items():
                    outcomes[outcome] = outcomes.get(outcome, 0) + count
            sums = [sum(line[key] for line in lines) for key in ("steps", "passes", "missed")]
            wrong = "  PROBLEMS" if any(line["problems"] for line in lines) else ""
            numbers = f"{len(lines):>7} {sums[0]:>6} {sums[1]:>6} {sums[2]:>7}"
            print(f"{result['part']:10} {case:34} {numbers}  {outcomes}{wrong}")
        verdict = "passed" if result["passed"] else "FAILED"
        print(f"{result['part']:10} {verdict} in {result['seconds']:.0f} s")
        for problem in result["problems"][:12]:
            print(f"{'':10} {problem}")


if __name__ == "__main__":
    sys.exit(main())
