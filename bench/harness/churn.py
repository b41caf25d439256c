"""Steps of a captured stack while a thread churns the arena that its layers read: bits must be the resident run's.

    python bench/harness/churn.py [--steps 10000] [--layers 6] [--coverage 25] [--arena 100] [--tokens 1] [--device D]

Every row is made of random bytes, and a row of other bytes, or half of one, gives other outputs; so a place of the
arena that is written to while a pass reads it shows. Status 0 if no output differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.harness.measure import Tiers, run_steps, service_over  # noqa: E402
from bench.harness.routing import synthetic  # noqa: E402
from bench.harness.rows import MemoryPack  # noqa: E402
from bench.harness.stack import Stack  # noqa: E402
from bench.shapes import SHAPES, MoeShape  # noqa: E402

_WARM = 16
_READERS = 8  # the default of tiers.disk.readers


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = churned(SHAPES[options.shape], device, options)
    print(json.dumps(found), flush=True)
    return 0 if found["same_bits"] else 1


def churned(model: MoeShape, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Both runs and what the thread did meanwhile."""
    shape = model.with_layers(options.layers)
    routing = synthetic(
        _WARM + options.steps, shape.layers, shape.experts, shape.top_k, options.tokens, zipf=0.8
    )
    pack = MemoryPack(shape, options.codec, distinct=2 * shape.experts)
    stack = Stack(routing, shape.hidden, device)
    graph = device.type == "cuda"
    whole = Tiers(shape.rows, _READERS, device, options.tokens, {"mode": "auto"})
    with service_over(pack, shape, whole) as service:
        resident = run_steps(service, stack, routing, warm=_WARM, graph=graph)
    if graph:
        torch.cuda.empty_cache()
    slots = max(1, round(shape.rows * options.coverage / 100))
    places = max(2 * _READERS, round(shape.rows * options.arena / 100))
    tiers = Tiers(slots, places, device, options.tokens, {"mode": "inline"})
    with (
        service_over(pack, shape, tiers) as service,
        service.churn(seed=options.seed, most=options.most) as churn,
    ):
        run = run_steps(service, stack, routing, warm=_WARM, graph=graph)
        value = service.metrics.value
        rows = int(value("ziggurat_inline_rows_total"))
        arena_misses = int(value("ziggurat_arena_misses_total"))
    return {
        "shape": shape.name,
        "layers": shape.layers,
        "codec": options.codec,
        "tokens": options.tokens,
        "steps": options.steps,
        "slots": slots,
        "places": places,
        "graph": graph,
        "evicted": churn.evicted,
        "filled": churn.filled,
        "inline_rows": rows,
        "arena_misses": arena_misses,
        "outcomes": dict(sorted(run.outcomes.items())),
        "same_bits": run.same_bits(resident),
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Steps beside a thread that churns the arena.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--codec", choices=("w2", "fp4", "bf16"), default="w2")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--coverage", type=float, default=25, help="percent of the experts in the pool")
    parser.add_argument(
        "--arena", type=float, default=100, help="percent of the experts that it has places for"
    )
    parser.add_argument("--most", type=int, default=2, help="rows that leave or come at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
