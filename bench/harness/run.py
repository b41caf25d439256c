"""Decode steps at real sizes without a model: MoE layers through the real tiers, captured once as a CUDA graph.

    python bench/harness/run.py [--shape deepseek-v4-flash] [--layers N] [--codec w2] [--tokens N ...]
                                [--trace FILE.npz] [--coverage 100 50 25 19] [--device cuda:0|cpu]

Every coverage runs the same steps, and its outputs are compared bit by bit with those of the run with every expert
resident. Routing is recorded (--trace) or drawn from a drifting Zipf law. Experts are random bytes in host memory;
`--distinct` rows stand for all of them. Added to `harness.json` in the result folder under --label.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.harness.measure import Run, Tiers, run_steps, service_over  # noqa: E402
from bench.harness.memory import READERS  # noqa: E402
from bench.harness.routing import Routing, TraceError, recorded, synthetic  # noqa: E402
from bench.harness.rows import MemoryPack  # noqa: E402
from bench.harness.stack import Stack  # noqa: E402
from bench.results_io import provenance, read_json, results_folder, write_json  # noqa: E402
from bench.shapes import SHAPES, MoeShape  # noqa: E402

_MIB = 1 << 20


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    origin = provenance(["bench/harness/run.py", *arguments], at=options.commit)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folder = options.results or results_folder(
        origin["machine"].get("gpu") if device.type == "cuda" else None
    )
    same = True
    for tokens in options.tokens:
        try:
            routing = _routing(options, tokens)
        except TraceError as error:
            print(f"harness: {error}", file=sys.stderr)
            return 1
        shape = _shape(SHAPES[options.shape], routing)
        result = measure(shape, routing, device, options)
        same &= all(line["same_bits"] for line in result["runs"])
        path = folder / "harness.json"
        content = read_json(path)
        content["what"] = "decode steps of MoE layers alone, by share of the experts in the pool"
        label = f"{options.label or options.shape} {options.codec} M={tokens}"
        content.setdefault("runs", {})[label] = {**result, **origin}
        write_json(path, content)
        print(table(label, result), flush=True)
    return 0 if same else 1


def measure(
    shape: MoeShape, routing: Routing, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """All coverages of one routing, the largest first; it must be 100 for the comparison to mean anything."""
    started = time.perf_counter()
    pack = MemoryPack(shape, options.codec, options.distinct)
    stack = Stack(routing, shape.hidden, device, dense_bytes=round(options.dense_mb * 1e6))
    graph = device.type == "cuda"
    link = link_gb_per_s(device) if graph else None
    reference: Run | None = None
    lines = []
    for percent in sorted(options.coverage, reverse=True):
        slots = max(1, round(shape.rows * percent / 100))
        places = READERS + (shape.rows if slots < shape.rows else 0)
        miss = {"mode": options.miss} if options.miss else {}
        tiers = Tiers(slots, places, device, routing.tokens, miss)
        with service_over(pack, shape, tiers) as service:
            run = run_steps(service, stack, routing, warm=options.warm, graph=graph)
        if graph:
            torch.cuda.empty_cache()  # the next pool has another size
        reference = reference or run
        lines.append(
            {
                **run.summary(shape.rows, pack.header.stride, routing.tokens),
                "link_ms_per_step": None
                if link is None
                else _ms_on(link, run.rows * pack.header.stride / len(run.ms)),
                "same_bits": run.same_bits(reference),
            }
        )
    return {
        "shape": shape.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "codec": options.codec,
        "tokens": routing.tokens,
        "routing": routing.source,
        "distinct_rows": pack.distinct,
        "row_mib": round(pack.header.stride / _MIB, 3),
        "dense_mb_per_layer": options.dense_mb,
        "warm_steps": options.warm,
        "graph": graph,
        "link_gb_per_s": link,
        "seconds": round(time.perf_counter() - started, 1),
        "runs": lines,
    }


def _routing(options: argparse.Namespace, tokens: int) -> Routing:
    steps = options.warm + options.steps
    if options.trace is not None:
        return recorded(options.trace, tokens, repeat=options.repeat_layers, steps=steps)
    shape = SHAPES[options.shape]
    return synthetic(
        steps,
        options.layers or shape.layers,
        shape.experts,
        shape.top_k,
        tokens,
        zipf=options.zipf,
        drift=options.drift,
    )


def _shape(shape: MoeShape, routing: Routing) -> MoeShape:
    """The sizes of `shape` with the layers, experts and choices of the routing."""
    return MoeShape(
        shape.name, routing.layers, routing.experts, routing.top_k, shape.hidden, shape.intermediate
    )


def link_gb_per_s(device: torch.device) -> float:
    """Pinned host memory to the device, the best of a few copies of 256 MiB."""
    host = torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return round(host.numel() / best / 1e6, 1)


def _ms_on(link: float, nbytes: float) -> float:
    """Milliseconds that so many bytes take on a link of so many GB/s."""
    return round(nbytes / link / 1e6, 4)


def table(label: str, result: dict[str, Any]) -> str:
    """The runs as lines of text."""
    head = (
        f"{label}: {result['layers']} layers of {result['experts']} experts, {result['routing']}, "
        f"{result['seconds']} s\n"
        f"{'coverage':>9}{'step ms':>10}{'mean':>10}{'no miss':>10}{'missed':>9}{'0-miss':>8}{'passes':>8}"
        f"{'MiB':>9}  bits"
    )
    lines = [head]
    for run in result["runs"]:
        clean = run["step_ms_without_miss"]
        lines.append(
            f"{run['coverage']:>9.1%}{run['step_ms']['median']:>10.3f}{run['step_ms']['mean']:>10.3f}"
            f"{'-' if clean is None else format(clean, '.3f'):>10}{run['missed_pairs_per_step']:>9.2f}"
            f"{run['zero_miss_share']:>8.1%}{run['passes_per_step']:>8.2f}{run['mib_per_step']:>9.1f}"
            f"  {'same' if run['same_bits'] else 'DIFFERENT'}"
        )
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode steps of MoE layers through the tiers, without a model."
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=None, help="default: all of the model's")
    parser.add_argument("--codec", choices=("w2", "fp4", "bf16"), default="w2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="sequences decoded together")
    parser.add_argument(
        "--coverage", type=float, nargs="+", default=[100, 50, 25, 19], help="percent of the experts"
    )
    parser.add_argument(
        "--trace", type=Path, default=None, help="recorded routing; its layers and experts are used"
    )
    parser.add_argument(
        "--repeat-layers", type=int, default=1, help="copies of the trace's layers on each other"
    )
    parser.add_argument("--zipf", type=float, default=1.3)
    parser.add_argument("--drift", type=float, default=0.05)
    parser.add_argument("--warm", type=int, default=64, help="steps that seed the tiers and are not measured")
    parser.add_argument("--steps", type=int, default=128, help="measured steps")
    parser.add_argument(
        "--dense-mb", type=float, default=0.0, help="megabytes of other weights read in each layer"
    )
    parser.add_argument("--distinct", type=int, default=512, help="different rows; all experts share them")
    parser.add_argument("--miss", choices=("auto", "inline", "replay"), default=None, help="miss mode")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=None, help="folder; default: one named after the GPU")
    parser.add_argument("--label", default=None, help="name of the run in the result file")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    if max(options.coverage) < 100:
        parser.error("--coverage needs 100, which the others are compared with")
    if min(options.steps, *options.tokens) < 1 or options.warm < 0 or min(options.coverage) <= 0:
        parser.error("--steps, --tokens and --coverage are positive, --warm is not negative")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
