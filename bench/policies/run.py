"""Eviction policies on routing traces: python bench/policies/run.py [--traces FOLDER].

Writes bench/results/policies.json. The committed trace is split by text: constants of `next-use` were chosen on its
first half. Traces of other models are read from a folder, since their licences do not let them be committed; without
it they are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.policies import host  # noqa: E402
from bench.results_io import RESULTS, provenance, read_json, write_json  # noqa: E402
from ziggurat.residency.simulation.device import DeviceSettings  # noqa: E402
from ziggurat.residency.simulation.events import make_events  # noqa: E402
from ziggurat.residency.simulation.importers import import_trace  # noqa: E402
from ziggurat.residency.simulation.simulate import (  # noqa: E402
    DEVICE,
    Result,
    Sharing,
    simulate,
    simulated_names,
)
from ziggurat.residency.simulation.trace import Trace  # noqa: E402

COVERAGES: Final = (10.0, 19.0, 25.0, 50.0)
BATCHES: Final = (1, 4, 16)
HALF_LIVES: Final = (8, 16, 32, 64, 256)
WINDOWS: Final = (16, 32, 128, 1 << 20)
PARTS: Final = ("grid", "device", "prompts", "host", "scans")
DEMO: Final = ROOT / "bench" / "traces" / "demo_moe.npz"


@dataclass(frozen=True, slots=True)
class Subject:
    """role: what the trace is to next-use: `train` (constants were chosen on it) or `test`."""

    trace: Trace
    label: str
    role: str
    ordered: bool = True


def subjects(folder: Path | None) -> Iterator[Subject]:
    """The traces to run, the committed one first."""
    demo = import_trace(DEMO)
    yield Subject(demo.part(0, 16, "demo"), "demo model, texts 1-16", "train")
    yield Subject(demo.part(16, 32, "demo"), "demo model, texts 17-32", "test")
    if folder is None:
        return
    yield Subject(import_trace(folder / "flame_moe_290m.npz"), "FLAME-MoE-290M", "test")
    yield Subject(import_trace(folder / "olmoe_layer0.npz"), "OLMoE-1B-7B, layer 0", "test", ordered=False)
    yield Subject(import_trace(folder / "qwen15_moe_a.npz"), "Qwen1.5-MoE a, layer 0", "test", ordered=False)
    yield Subject(import_trace(folder / "qwen15_moe_b.npz"), "Qwen1.5-MoE b, layer 0", "test", ordered=False)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Eviction policies on routing traces.")
    parser.add_argument("--traces", type=Path, default=None, help="folder of traces that are not committed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--sequences", type=int, default=None, help="of each trace at most so many")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run anew")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    content: dict[str, Any] = {}
    if "grid" in options.parts:
        content |= grid(options.traces, options.sequences)
    if "device" in options.parts:
        content["device"] = device_sweep(options.traces, options.sequences)
    if "prompts" in options.parts:
        content["prompts"] = prompts(options.sequences)
    if "host" in options.parts:
        content["host"] = host_study(options.traces, options.sequences)
    if "scans" in options.parts:
        content["host_scans"] = host.scans(_demo(options.sequences), min(4, options.sequences or 4))
    origin = provenance(["bench/policies/run.py", *arguments], at=options.commit)
    path = options.results / "policies.json"
    so_far = read_json(path)
    write_json(
        path,
        {**so_far, **content, "origins": {**so_far.get("origins", {}), **dict.fromkeys(content, origin)}},
    )
    return 0


def grid(folder: Path | None, sequences: int | None) -> dict[str, Any]:
    """All policies on all traces, and how fast each is simulated."""
    found = []
    speed: dict[str, tuple[int, float]] = {}
    for subject in subjects(folder):
        for cell, seconds in cells(shortened(subject, sequences)):
            found.append(cell)
            for name, (pairs, took) in seconds.items():
                so_far = speed.get(name, (0, 0.0))
                speed[name] = (so_far[0] + pairs, so_far[1] + took)
            print(subject.label, cell["pool"], cell["batch"], cell["coverage"], flush=True)
    return {
        "grid": found,
        "pairs_per_second": {name: round(pairs / took) for name, (pairs, took) in speed.items()},
    }


def shortened(subject: Subject, sequences: int | None) -> Subject:
    """The same with at most so many sequences."""
    if sequences is None:
        return subject
    trace = subject.trace.part(0, sequences, subject.trace.name)
    return Subject(trace, subject.label, subject.role, subject.ordered)


def cells(subject: Subject) -> Iterator[tuple[dict[str, Any], dict[str, tuple[int, float]]]]:
    """One dictionary a pool, batch and coverage; and pairs and seconds of each policy."""
    several = subject.trace.sequences > 1
    batches = BATCHES if subject.role == "test" else BATCHES[:2]
    for batch in batches if several else BATCHES[:1]:
        if batch > subject.trace.sequences:
            continue
        events = make_events(subject.trace, batch)
        pools: tuple[Sharing, ...] = (
            ("shared", "layer") if batch == 1 and subject.trace.layers > 1 else ("shared",)
        )
        for pool in pools:
            for coverage in COVERAGES if pool == "shared" else COVERAGES[2:]:
                policies: dict[str, Any] = {}
                seconds: dict[str, tuple[int, float]] = {}
                slots = 0
                for name in simulated_names():
                    if name == DEVICE and pool == "layer":
                        continue
                    started = time.process_time()
                    result = simulate(events, name, coverage, sharing=pool)
                    seconds[name] = (result.all.pairs, time.process_time() - started)
                    policies[name] = summary(result)
                    slots = result.slots
                cell = {
                    "trace": subject.label,
                    "role": subject.role,
                    "ordered": subject.ordered,
                    "pool": pool,
                    "batch": batch,
                    "coverage": coverage,
                    "slots": slots,
                    "policies": policies,
                }
                yield cell, seconds


def summary(result: Result) -> dict[str, float]:
    """Of all steps: pairs that hit in percent, rows brought a step, steps without a miss in percent; and the hits once
    the pool was full."""
    return {
        "hits": round(100 * result.all.hit_ratio, 2),
        "steady": round(100 * result.steady.hit_ratio, 2),
        "rows": round(result.all.rows_per_step, 3),
        "clean": round(100 * result.all.zero_miss_steps / result.all.steps, 2),
    }


def device_sweep(folder: Path | None, sequences: int | None) -> list[dict[str, Any]]:
    """The device's rules with other constants."""
    lines = []
    for subject in subjects(folder):
        if not subject.ordered or subject.role == "train":
            continue
        trace = subject.trace.part(0, min(sequences or 8, subject.trace.sequences), subject.trace.name)
        for batch in (1, 4):
            events = make_events(trace, batch)
            for coverage in (25.0, 50.0):
                settings = [
                    *(DeviceSettings(half_life=steps) for steps in HALF_LIVES),
                    *(DeviceSettings(half_life=steps, distance=True) for steps in HALF_LIVES),
                    *(DeviceSettings(candidates=window, half_life=16) for window in WINDOWS if window != 32),
                    DeviceSettings(half_life=16, presence=True),
                    DeviceSettings(candidates=128, half_life=16, distance=True),
                ]
                runs = []
                for one in settings:
                    found = simulate(events, DEVICE, coverage, sharing="shared", device=one).all
                    runs.append(
                        {
                            "candidates": one.candidates,
                            "half_life": one.half_life,
                            "presence": one.presence,
                            "distance": one.distance,
                            "hits": round(100 * found.hit_ratio, 2),
                            "rows": round(found.rows_per_step, 3),
                        }
                    )
                lines.append({"trace": subject.label, "batch": batch, "coverage": coverage, "runs": runs})
    return lines


def host_study(folder: Path | None, sequences: int | None) -> list[dict[str, Any]]:
    """Arenas below the device's pool, on the traces that have an order."""
    chosen = [shortened(one, sequences) for one in subjects(folder) if one.ordered and one.role == "test"]
    return host.study((one.label, one.trace) for one in chosen)


def _demo(sequences: int | None) -> Trace:
    """The half of the committed trace that no constant was chosen on."""
    return import_trace(DEMO).part(16, 16 + min(sequences or 16, 16), "demo")


def prompts(sequences: int | None) -> list[dict[str, Any]]:
    """Four sequences side by side whose first half is a prompt: what scans do to the hits of decoding."""
    whole = _demo(sequences)
    trace = Trace(whole.ids, whole.experts, whole.lengths, whole.lengths // 2, name=whole.name)
    events = make_events(trace, 4)
    lines = []
    for coverage in (25.0, 50.0):
        hits = {}
        for name in simulated_names():
            found = simulate(events, name, coverage, sharing="shared").all
            hits[name] = round(100 * found.decode_hits / found.decode_pairs, 2)
        lines.append({"coverage": coverage, "decode_hits": hits})
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
