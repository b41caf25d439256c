"""How well the device chooses what to evict: its rules beside the host's policies, on recorded routing, on the CPU.

    python bench/admission_policy.py [--traces FOLDER] [--steps N] [--variants CANDIDATES:HALF_LIFE ...]

Every policy serves the same steps from a pool that is empty at first, in the order in which layers run, and keeps what
the layer in hand is routed to. Batches are sequences decoded side by side; when they end, the next ones begin. `belady`
knows the future: no policy misses less. Written to `bench/results/admission_policy.json`. --traces: a folder with more
traces than the one in `bench/traces`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from bench.harness.mapping import mapped  # noqa: E402
from bench.harness.routing import TraceError, load_trace  # noqa: E402
from bench.policy_pools import BeladyPool, HostPool, Pool, PoolStep  # noqa: E402
from bench.results_io import RESULTS, provenance, write_json  # noqa: E402
from bench.shapes import SHAPES  # noqa: E402
from ziggurat.kernels.admission import CANDIDATES, HALF_LIFE  # noqa: E402
from ziggurat.residency.admission_model import AdmissionModel, AdmissionRules  # noqa: E402
from ziggurat.residency.prediction import side_by_side  # noqa: E402

TRACE = ROOT / "bench" / "traces" / "demo_moe.npz"
COVERAGES = (0.5, 0.25, 0.19)
#: The host's policies that are shown beside; bench/policies compares all.
COMPARED = ("lfu-decay", "lru")
BATCHES = (1, 8)
_MAPPED_STEPS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One routing: per step and layer the experts of a batch and their pairs."""

    trace: str
    tokens: int
    layers: int
    experts: int
    steps: list[list[PoolStep]]


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    origin = provenance(["bench/admission_policy.py", *arguments], at=options.commit)
    started = time.perf_counter()
    runs = []
    for case in _cases(options):
        for coverage in COVERAGES:
            runs.append(_compare(case, coverage, options.variants))
            print(_line(runs[-1]), flush=True)
    result = {
        "what": "share of the experts of a step that were not in the pool, by who chooses what to evict",
        "rules": {"candidates": CANDIDATES, "half_life": HALF_LIFE},
        "runs": runs,
        "seconds": round(time.perf_counter() - started, 1),
        **origin,
    }
    write_json(options.output, result)
    return 0


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    files = [TRACE]
    if options.traces is not None:
        files += [path for path in sorted(options.traces.glob("*.npz")) if path.name != TRACE.name]
    for path in files:
        try:
            trace = _as_sequences(path)
        except TraceError as error:
            print(f"left out: {error}", flush=True)
            continue
        experts = 1 << int(trace.max()).bit_length()
        for tokens in BATCHES:
            yield _case(path.stem, as_steps(trace, tokens)[: options.steps], experts)
    shape = SHAPES["deepseek-v4-flash"]
    for tokens in BATCHES:
        yield _case(
            f"{TRACE.stem} as {shape.name}", mapped(TRACE, shape, tokens, _MAPPED_STEPS).ids, shape.experts
        )


def _as_sequences(path: Path) -> npt.NDArray[np.integer]:
    """[sequences, positions, layers, k]; a flat file of one layer is one sequence in the order of the file."""
    with np.load(path) as file:
        if "ids" in file.files and file["ids"].ndim == 2:
            flat: npt.NDArray[np.integer] = file["ids"]
            return flat[None, :, None, :]
    return load_trace(path)


def as_steps(trace: npt.NDArray[np.integer], tokens: int) -> npt.NDArray[np.integer]:
    """[steps, layers, tokens, k]. A single sequence is cut into consecutive tokens: they came from batches already."""
    sequences, positions, layers, k = trace.shape
    if sequences > 1:
        return side_by_side(trace, tokens)
    steps = positions // tokens
    return trace[0, : steps * tokens].reshape(steps, tokens, layers, k).swapaxes(1, 2)


def _case(name: str, ids: npt.NDArray[np.integer], experts: int) -> Case:
    steps, layers, tokens, _ = ids.shape
    found = []
    for step in range(steps):
        counts = [np.bincount(ids[step, layer].reshape(-1), minlength=experts) for layer in range(layers)]
        found.append([PoolStep(np.flatnonzero(one), one[np.flatnonzero(one)]) for one in counts])
    return Case(name, tokens, layers, experts, found)


def _compare(case: Case, coverage: float, variants: Sequence[AdmissionRules]) -> dict[str, Any]:
    slots = max(1, round(case.layers * case.experts * coverage))
    size = (case.layers, case.experts, slots)
    pools: dict[str, Pool] = {"device": AdmissionModel(*size)}
    pools |= {_name(rules): AdmissionModel(*size, rules) for rules in variants}
    pools |= {name: HostPool(*size, name) for name in COMPARED}
    pools["belady"] = BeladyPool(*size, case.steps)
    routed = sum(len(layer.experts) for step in case.steps for layer in step)
    return {
        "trace": case.trace,
        "tokens": case.tokens,
        "layers": case.layers,
        "experts": case.experts,
        "coverage": coverage,
        "slots": slots,
        "steps": len(case.steps),
        "routed_per_step": round(routed / len(case.steps), 2),
        "missed_share": {name: round(_missed(pool, case) / routed, 4) for name, pool in pools.items()},
    }


def _missed(pool: Pool, case: Case) -> int:
    return sum(
        len(pool.admit(layer, one.experts, one.pairs))
        for step in case.steps
        for layer, one in enumerate(step)
    )


def _name(rules: AdmissionRules) -> str:
    return f"device {rules.candidates}:{rules.half_life}"


def _line(run: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {share:.1%}" for name, share in run["missed_share"].items())
    return f"{run['trace']}, {run['tokens']} tokens, {run['coverage']:.0%} ({run['slots']} slots): {shares}"


def _rules(text: str) -> AdmissionRules:
    candidates, _, half_life = text.partition(":")
    return AdmissionRules(int(candidates), int(half_life))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=None, help="folder of more .npz traces")
    parser.add_argument("--steps", type=int, default=2048, help="of each trace at most")
    parser.add_argument(
        "--variants", type=_rules, nargs="*", default=[], help="other constants, as CANDIDATES:HALF_LIFE"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "admission_policy.json")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    if options.steps < 1 or any(min(one.candidates, one.half_life) < 1 for one in options.variants):
        parser.error("--steps and the constants of --variants are positive")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
