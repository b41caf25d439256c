"""Decode steps with inline misses beside replayed ones and beside the all-resident step, over the same routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from bench.harness.link import Link
from bench.harness.measure import Run, run_steps, start_anew
from bench.harness.memory import SharedMemory
from bench.harness.routing import Routing
from bench.harness.stack import Stack
from ziggurat.kernels.lookahead import CHUNK_BYTES
from ziggurat.residency.prediction import Misses, StepEstimate, misses_of_routing
from ziggurat.residency.service import ExpertService

_MIB = 1 << 20
INLINE, REPLAY, AHEAD = "inline", "replay", "ahead"
MODES = (INLINE, AHEAD, REPLAY)
FORCED = "forced"  # inline, with a pool that holds every row
Done = Callable[[], None]
Visit = Callable[[ExpertService, str, float], None]


@dataclass(slots=True)
class Case:
    """One routing, and what was found for it. warm: steps that seed the tiers and are not measured.

    resident: every row in the pool. forced: the same, but layers admit their experts nevertheless. recall: of guesses,
    the share of the experts of layers that have guesses which are among their token's.
    """

    label: str
    routing: Routing
    warm: int
    stack: Stack
    resident: Run | None = None
    forced: Run | None = None
    runs: dict[float, dict[str, Run]] = field(default_factory=dict)
    expected: dict[float, Misses] = field(default_factory=dict)
    recall: float | None = None


def measure(
    memory: SharedMemory,
    cases: Sequence[Case],
    coverages: Sequence[float],
    *,
    left: Callable[[], float],
    done: Done,
    modes: Sequence[str] = (INLINE, REPLAY),
    lookahead: int = 0,
    link: Link | None = None,
    visit: Visit = lambda service, mode, coverage: None,
) -> None:
    """Fills `cases`. coverages: shares of the rows. left: seconds for more; without any, no pool is begun any more.
    modes: AHEAD is INLINE with `lookahead` guesses a token, those of the cases' stacks. link: sampled beside each case.

    done: called after each pool, to save what there is. visit: called with each service after its cases, the mode and
    the coverage; the all-resident one's mode is "auto", or FORCED where its layers admit nevertheless.
    """
    rows = memory.shape.rows
    with _told("all resident"), memory.service(rows, "auto") as service:
        for case in cases:
            case.resident = run(service, case, link)
        visit(service, "auto", 1.0)
    done()
    with _told("all resident, admitting"), memory.service(rows, INLINE) as service:
        for case in cases:
            case.forced = run(service, case, link)
        visit(service, FORCED, 1.0)
    done()
    for coverage in coverages:
        slots = slots_of(memory, coverage)
        for mode in modes:
            if left() <= 0:
                print(f"no time left for {mode} at {coverage:.0%}", flush=True)
                continue
            ahead = mode == AHEAD
            served = INLINE if ahead else mode
            with (
                _told(f"{mode} at {coverage:.0%}"),
                memory.service(slots, served, lookahead=lookahead if ahead else 0) as service,
            ):
                for case in cases:
                    if ahead:
                        service.lookahead.by(case.stack.guess)
                    case.runs.setdefault(coverage, {})[mode] = run(service, case, link)
                visit(service, mode, coverage)
            done()
        for case in cases:
            case.expected[coverage] = misses_of_routing(
                case.routing.ids, memory.shape.experts, slots, warm=case.warm
            )
        done()


def slots_of(memory: SharedMemory, coverage: float) -> int:
    return max(1, round(memory.shape.rows * coverage))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says how long it took."""
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


def run(service: ExpertService, case: Case, link: Link | None = None) -> Run:
    """The steps of a case from a warm start."""
    start_anew(service)
    graph = case.stack.device.type == "cuda"
    return run_steps(service, case.stack, case.routing, warm=case.warm, graph=graph, link=link)


def report(case: Case, stride: int, rows: int, link: float | None) -> dict[str, Any]:
    """What goes into a result file. rows: of all layers. link: the best GB/s of the whole process, None where there is
    none to measure."""
    result: dict[str, Any] = {
        "label": case.label,
        "tokens": case.routing.tokens,
        "routing": case.routing.source,
        "warm_steps": case.warm,
        "steps": case.routing.steps - case.warm,
    }
    resident = case.resident
    if case.recall is not None:
        result["recall"] = round(case.recall, 4)
    if resident is None:
        return result
    result["resident_ms"] = _ms(resident)
    result["resident_host_us"] = _host(resident)
    if resident.link is not None:
        result["resident_link_gb_per_s"] = round(resident.link, 2)
    if case.forced is not None:
        forced = _ms(case.forced)
        result["forced"] = {
            "step_ms": forced,
            "host_us": _host(case.forced),
            "missed_rows_per_step": round(case.forced.rows / len(case.forced.ms), 3),
            "overhead": round(forced["median"] / result["resident_ms"]["median"] - 1, 4),
            "same_bits": case.forced.same_bits(resident),
        }
    result["runs"] = [
        {
            "coverage": coverage,
            "slots": max(1, round(rows * coverage)),
            **{mode: _mode(one, resident, stride, link) for mode, one in by_mode.items()},
            **_expected(case, coverage, stride, link, by_mode),
        }
        for coverage, by_mode in case.runs.items()
    ]
    return result


def _ms(run: Run) -> dict[str, float]:
    return {name: round(of(run.ms), 4) for name, of in (("median", median), ("mean", mean))}


def _host(run: Run) -> dict[str, float]:
    """Medians, see `Run`."""
    return {"before": round(median(run.before_us), 1), "whole": round(median(run.host_us), 1)}


def _mode(run: Run, resident: Run, stride: int, link: float | None) -> dict[str, Any]:
    """One mode at one coverage."""
    steps = len(run.ms)
    rows = run.rows / steps
    ahead = run.ahead
    found: dict[str, Any] = {
        "step_ms": _ms(run),
        "passes_per_step": round(sum(run.passes) / steps, 3),
        "outcomes": dict(sorted(run.outcomes.items())),
        "missed_pairs_per_step": round(sum(run.misses) / steps, 3),
        "missed_rows_per_step": round(rows, 3),
        "missed_mib_per_step": round(rows * stride / _MIB, 3),
        "same_bits": run.same_bits(resident),
    }
    found |= ratios(run, resident, stride, link)
    if ahead.guessed:
        chunk = CHUNK_BYTES / _MIB / steps
        found["ahead"] = {
            "guessed_rows_per_step": round(ahead.guessed / steps, 3),
            "wanted_rows_per_step": round(ahead.matched / steps, 3),
            "recall_missing": round(ahead.matched / max(1, run.rows), 4),
            "fetched_mib_per_step": round(ahead.fetched * chunk, 3),
            "used_mib_per_step": round(ahead.used * chunk, 3),
            "wasted_mib_per_step": round((ahead.fetched - ahead.used) * chunk, 3),
        }
    return found


def ratios(run: Run, resident: Run, stride: int, best: float | None) -> dict[str, Any]:
    """A run's steps beside what the resident step and its rows over the link take; nothing without a link.

    ratio: to the sum of the two; limit_ratio: to the larger of them, which no order of work can beat. The link is the
    one that was sampled between the run's own steps. best: GB/s of the whole process, for the same ratios beside them.
    """
    beside = run.link or best
    if beside is None or best is None:
        return {}
    took, work, nbytes = mean(run.ms), mean(resident.ms), run.rows / len(run.ms) * stride
    link_ms, best_ms = nbytes / beside / 1e6, nbytes / best / 1e6
    return {
        "link_gb_per_s": round(beside, 2),
        "links_gb_per_s": run.links,
        "resident_step_ms": round(work, 4),
        "link_ms": round(link_ms, 4),
        "ratio": round(took / (work + link_ms), 4),
        "ratio_to_best_link": round(took / (work + best_ms), 4),
        "limit_ratio": round(took / max(work, link_ms), 4),
        "limit_ratio_to_best_link": round(took / max(work, best_ms), 4),
    }


def _expected(
    case: Case, coverage: float, stride: int, link: float | None, by_mode: dict[str, Run]
) -> dict[str, Any]:
    misses, resident = case.expected.get(coverage), case.resident
    if misses is None or resident is None:
        return {}
    found: dict[str, Any] = {"missed_rows_per_step": round(misses.rows, 3)}
    measured = by_mode.get(INLINE)
    if measured is not None and measured.link is not None:
        link = measured.link  # what is looked at is the estimate, not how busy the host was
    if link is not None:
        estimate = StepEstimate(case.routing.tokens, misses, stride, link, mean(resident.ms))
        assert estimate.step_ms is not None
        found["step_ms"] = round(estimate.step_ms, 4)
        if measured is not None:
            found["error"] = round(estimate.step_ms / mean(measured.ms) - 1, 4)
    return {"predicted": found}


def table(result: dict[str, Any]) -> str:
    """One case as lines of text."""
    if "resident_ms" not in result:
        return f"{result['label']}: nothing measured"
    lines = [f"{result['label']}, {result['routing']}: resident {result['resident_ms']['mean']:.3f} ms"]
    if "forced" in result:
        forced = result["forced"]
        lines[0] += (
            f", admitting without a miss {forced['step_ms']['mean']:.3f} ms ({forced['overhead']:+.1%}), "
            f"{'same' if forced['same_bits'] else 'DIFFERENT'} bits"
        )
    for one in result.get("runs", ()):
        lines += [_line(one, mode) for mode in MODES if mode in one]
    return "\n".join(lines)


def _line(one: dict[str, Any], mode: str) -> str:
    run = one[mode]
    text = (
        f"  {one['coverage']:>4.0%} {mode:<7}{run['step_ms']['mean']:>9.3f} ms {run['missed_rows_per_step']:>8.2f} rows"
        f"{run['missed_mib_per_step']:>9.1f} MiB{run['passes_per_step']:>6.2f} passes"
    )
    if "ratio" in run:
        text += (
            f"  link {run['link_gb_per_s']:.1f} GB/s, {run['link_ms']:.3f} ms, ratio {run['ratio']:.3f} "
            f"({run['ratio_to_best_link']:.3f}), of the limit {run['limit_ratio']:.3f}"
        )
    if "ahead" in run:
        ahead = run["ahead"]
        text += (
            f", {ahead['guessed_rows_per_step']:.2f} rows guessed, {ahead['recall_missing']:.0%} of the missing among "
            f"them, {ahead['used_mib_per_step']:.1f} MiB used, {ahead['wasted_mib_per_step']:.1f} wasted"
        )
    if mode == INLINE and "error" in one.get("predicted", {}):
        text += f", predicted {one['predicted']['step_ms']:.3f} ms ({one['predicted']['error']:+.1%})"
    return f"{text}  {'same' if run['same_bits'] else 'DIFFERENT'} bits"


def all_same(result: dict[str, Any]) -> bool:
    """Whether every run of a case has the bits of the all-resident one."""
    runs = [one[mode] for one in result.get("runs", ()) for mode in MODES if mode in one]
    return all(one["same_bits"] for one in [*runs, *([result["forced"]] if "forced" in result else [])])
