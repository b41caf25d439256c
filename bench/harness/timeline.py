"""What the device does in one step: every kernel with its start and duration, and what overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bench.gpu_timing import Span, device_spans
from bench.harness.measure import start_anew, warmed
from bench.harness.routing import Routing
from bench.harness.stack import Stack
from ziggurat.residency.service import ExpertService, StepTokens

GATHER = "gather"
_LISTED_LAYERS = 4


def profiled(service: ExpertService, stack: Stack, routing: Routing, warm: int) -> list[Span]:
    """The activities of step number `warm`, captured as a graph, after the warm ones. Needs a CUDA device."""
    from torch.profiler import ProfilerActivity, profile

    start_anew(service)
    forward = warmed(service, stack, routing, warm, graph=True)
    tokens = StepTokens(stack.tokens)
    for step in range(warm):
        stack.load(step)
        service.run_step(forward, tokens)
    with profile(activities=[ProfilerActivity.CUDA]):
        service.run_step(forward, tokens)  # the profiler's own start is not part of what is looked at
        torch.cuda.synchronize()
    stack.load(warm)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        service.run_step(forward, tokens)
        torch.cuda.synchronize()
    return from_zero(device_spans(profiler.events() or ()))


def from_zero(activities: Iterable[Span]) -> list[Span]:
    """In order of their starts, the first of which is 0."""
    ordered = sorted(activities, key=lambda one: one.start)
    return [one._replace(start=one.start - ordered[0].start) for one in ordered]


def summary(activities: Sequence[Span], row_bytes: int) -> dict[str, Any]:
    """Totals by kernel, time without any, and what the gathers reach; the kernels of the first layers in full.

    gather_alone_us: only gathers run. A gather that finds nothing to copy is over in a few microseconds.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in activities:
        by_name[one.name].append(one.us)
    gathers = [one for one in activities if one.name.startswith(GATHER)]
    others = [one for one in activities if not one.name.startswith(GATHER)]
    everything, without = _covered(activities), _covered(others)
    span = max(one.end for one in activities)
    return {
        "span_us": round(span, 1),
        "busy_us": round(everything, 1),
        "idle_us": round(span - everything, 1),
        "gather_us": round(_covered(gathers), 1),
        "gather_alone_us": round(everything - without, 1),
        "row_bytes": row_bytes,
        "kernels": [
            {"name": name, "count": len(each), "us": round(sum(each), 1)}
            for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1]))
        ],
        "first_layers": [f"{one.start:.1f} +{one.us:.1f} {one.name}" for one in _first(activities)],
    }


def _first(activities: Sequence[Span]) -> list[Span]:
    """Up to the last kernel of the first few layers."""
    seen = 0
    for number, one in enumerate(activities):
        seen += one.name.startswith("combine")
        if seen == _LISTED_LAYERS:
            return list(activities[: number + 1])
    return list(activities)


def _covered(activities: Iterable[Span]) -> float:
    """Length of the union of their intervals."""
    total, end = 0.0, float("-inf")
    for one in sorted(activities, key=lambda activity: activity.start):
        total += max(0.0, one.end - max(one.start, end))
        end = max(end, one.end)
    return total
