"""What metrics cost: a scrape of one rank's numbers, and booking one step.

    python bench/scrape_cost.py [--output FILE] [--commit ID]

A scrape is what the API server does with them: read the buffer, make Prometheus's families, write the page. A step is
booked as the service does it, with misses in every layer. Times are processor time, the median and the least of many.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from bench.results_io import RESULTS, provenance, write_json  # noqa: E402
from ziggurat.integration.observability.collector import TierCollector  # noqa: E402
from ziggurat.residency.account import Account  # noqa: E402
from ziggurat.residency.fetch import FetchTally  # noqa: E402
from ziggurat.residency.geometry import ServiceGeometry  # noqa: E402
from ziggurat.residency.heat import HeatMap  # noqa: E402
from ziggurat.residency.metric_specs import METRICS  # noqa: E402
from ziggurat.residency.metrics import TierMetrics  # noqa: E402
from ziggurat.residency.passes import StepResult, StepState, StepTokens  # noqa: E402

MODELS = {"demo-moe": (6, 32, 4), "deepseek-v4-flash": (43, 256, 6), "glm-5.2": (75, 256, 8)}
"""Name -> MoE layers, experts of each, experts of a token."""
REPEATS = 200
MISSED_ROWS = 10


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What metrics cost.")
    parser.add_argument("--output", type=Path, default=RESULTS / "scrape_cost.json")
    parser.add_argument("--commit", help="the commit, where the tree came without git")
    options = parser.parse_args(arguments)
    runs = [measure(name, *sizes) for name, sizes in MODELS.items()]
    for run in runs:
        print(f"{run['model']}: {run['series']} series, scrape {run['scrape_ms']}, step {run['step_us']}")
    origin = provenance(["bench/scrape_cost.py", *arguments], at=options.commit)
    write_json(options.output, {"repeats": REPEATS, "missed_rows": MISSED_ROWS, "runs": runs, **origin})
    return 0


def measure(name: str, layers: int, experts: int, top_k: int) -> dict[str, Any]:
    """Both costs for a model of that size, with every series there."""
    metrics = TierMetrics()
    infos = {spec.name: {label: "?" for label, _ in spec.labels} for spec in METRICS if spec.kind == "info"}
    metrics.describe(range(layers), infos)
    registry = CollectorRegistry()
    registry.register(TierCollector(lambda: {0: metrics.samples()}))
    book = _booking(metrics, layers, experts, top_k)
    page = generate_latest(registry).decode()
    return {
        "model": name,
        "layers": layers,
        "series": sum(not line.startswith("#") for line in page.splitlines()),
        "page_bytes": len(page),
        "scrape_ms": _times(lambda: generate_latest(registry), 1e3),
        "step_us": _times(book, 1e6),
    }


def _booking(metrics: TierMetrics, layers: int, experts: int, top_k: int) -> Callable[[], None]:
    """Books one step of one token that missed a few rows."""
    geometry = ServiceGeometry(layers, experts, top_k, 64, 64, tuple(range(layers)))
    heat = HeatMap(layers, experts)
    heat.counts[:] = np.random.default_rng(0).random(heat.counts.shape)
    table = SimpleNamespace(numpy=np.zeros(heat.counts.shape, dtype=np.int32))
    slots = SimpleNamespace(evictions=0, slots=layers * experts // 4, used=layers * experts // 4, table=table)
    cache = SimpleNamespace(evictions=0, waits=0, capacity=layers * experts // 2, used=100, stride=1 << 20)
    fetcher = SimpleNamespace(take_tally=lambda: _tally(experts), on_depth=None)
    account = Account(metrics, geometry, cast(Any, slots), cast(Any, cache), cast(Any, fetcher), heat)
    seconds = {"first_pass": 0.01, "repeated_passes": 0.01, "fetch": 0.002}
    pairs = layers * top_k
    step = StepState(StepTokens(1), 1, routed_pairs=pairs, missed_pairs=MISSED_ROWS, seconds=seconds)
    result = StepResult(None, "replayed", 2, MISSED_ROWS)
    return lambda: account.step(step, result)


def _tally(experts: int) -> FetchTally:
    tally = FetchTally()
    tally.rows["arena"] = MISSED_ROWS
    tally.seconds["arena"] = [0.0002] * MISSED_ROWS
    tally.keys = [row * experts for row in range(5)] * (MISSED_ROWS // 5)
    tally.asked = [float(MISSED_ROWS)]
    return tally


def _times(call: Callable[[], object], scale: float) -> dict[str, float]:
    """Median, mean and least processor time of a call, in seconds times `scale`."""
    taken = []
    for _ in range(REPEATS):
        begun = time.process_time()
        call()
        taken.append((time.process_time() - begun) * scale)
    return {
        "median": round(statistics.median(taken), 3),
        "mean": round(statistics.fmean(taken), 3),
        "least": round(min(taken), 3),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
