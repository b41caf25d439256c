"""Where a server's time goes on the GPU: torch profiler traces of its worker, added up by kernel."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.kernel_names import short_name

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_TOP = 20


def profiler_arguments(folder: Path) -> list[str]:
    """What makes a vLLM server ready to be profiled into `folder`; nothing is recorded before it is asked to."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.absolute()),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    return ["--profiler-config", json.dumps(config)]


def summarize(folder: Path, tokens: int) -> dict[str, Any]:
    """All traces in a folder, of a load of one stream that generated `tokens`. Times are microseconds a token.

    span: from the first device activity to the last. busy: at least one activity runs. top: the longest kernels.
    ValueError if no trace holds any device activity.
    """
    activities = [one for path in sorted(folder.rglob("*.json*")) for one in _activities(_read(path))]
    if not activities:
        raise ValueError("the traces hold no activity of a device")
    first = min(start for _, start, _ in activities)
    last = max(start + us for _, start, us in activities)
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, _, us in activities:
        by_name[name].append(us)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "tokens": tokens,
        "span_us": round((last - first) / tokens, 2),
        "busy_us": round(_covered([(start, start + us) for _, start, us in activities]) / tokens, 2),
        "activities": round(len(activities) / tokens, 2),
        "top": [
            {"name": name, "us": round(sum(each) / tokens, 3), "count": round(len(each) / tokens, 2)}
            for name, each in longest[:_TOP]
        ],
    }


def _read(path: Path) -> dict[str, Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        found = json.load(file)
    return found if isinstance(found, dict) else {}


def _activities(trace: dict[str, Any]) -> Iterable[tuple[str, float, float]]:
    """(name, start, duration) of what ran on the device, in microseconds."""
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X" and event.get("cat") in _DEVICE:
            yield short_name(str(event["name"])), float(event["ts"]), float(event["dur"])


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
