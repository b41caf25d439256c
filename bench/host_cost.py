"""What a step costs the host when nothing is missing: the tiers' own Python, without a model.

    python bench/host_cost.py [--steps N] [--device cpu|cuda:0] [--results FOLDER]

The real service runs steps whose forward does nothing, as a replayed graph does nothing on the host: what is left is
our code around it. Every row is in the pool, or, for `inline`, half of them and all in the host arena. *before* is the
time until the forward begins, which on an idle device adds to the step in full; *after* the time from its end until the
step returns, which a device that is still busy hides; *beside* the processor time of the process's other threads, which
share the interpreter: booking, above all. Microseconds a step, medians over rounds. On a CPU, copies to the host are
copies of memory and events cost nothing. Two steps are --gap-us apart, so that caches are neither warm nor cold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.harness.measure import Tiers, service_over  # noqa: E402
from bench.harness.rows import MemoryPack  # noqa: E402
from bench.results_io import provenance, results_folder, write_json  # noqa: E402
from bench.shapes import MoeShape  # noqa: E402
from ziggurat.residency.passes import PassPath  # noqa: E402
from ziggurat.residency.service import ExpertService, StepTokens  # noqa: E402

# As many layers, experts and choices as the models; only the rows are small.
MODELS = (MoeShape("demo", 6, 32, 4, 64, 64), MoeShape("deepseek-v4-flash", 43, 256, 6, 64, 64))
BATCHES = (1, 32)
READERS = 8


@dataclass(frozen=True, slots=True)
class Setup:
    """coverage: share of the rows in the pool. miss: mode."""

    name: str
    coverage: float
    miss: str


SETUPS = (
    Setup("all resident", 1.0, "auto"),
    Setup("all resident, admitting", 1.0, "inline"),
    Setup("inline", 0.5, "inline"),
)


class Stopwatch:
    """A forward that does nothing and remembers when."""

    def __init__(self) -> None:
        self.called = 0.0

    def __call__(self, path: PassPath) -> None:
        self.called = time.perf_counter()


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    device = torch.device(options.device)
    origin = provenance(["bench/host_cost.py", *arguments], at=options.commit)
    runs = []
    for shape in MODELS:
        pack = MemoryPack(shape, "w2", 512)
        for setup in SETUPS:
            for tokens in BATCHES:
                found = measure(pack, shape, setup, tokens, device, options)
                runs.append({"model": shape.name, "setup": setup.name, "tokens": tokens, **found})
                print(f"{shape.name}, {setup.name}, {tokens} tokens: {found}", flush=True)
    what = "host time of steps whose forward does nothing, in microseconds"
    gpu = origin["machine"].get("gpu") if device.type == "cuda" else None
    write_json(
        (options.results or results_folder(gpu)) / "host_cost.json", {"what": what, "runs": runs, **origin}
    )
    return 0


def measure(
    pack: MemoryPack,
    shape: MoeShape,
    setup: Setup,
    tokens: int,
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Microseconds a step."""
    slots = round(shape.rows * setup.coverage)
    tiers = Tiers(slots, shape.rows + READERS, device, max(BATCHES), {"mode": setup.miss})
    with service_over(pack, shape, tiers) as service:
        service.warm_start()
        service.preheated()
        rounds = [
            _round(service, StepTokens(tokens), options.steps, options.gap_us / 1e6)
            for _ in range(options.rounds + 1)
        ]
    return {name: round(statistics.median(one[name] for one in rounds[1:]), 2) for name in rounds[0]}


def _round(service: ExpertService, tokens: StepTokens, steps: int, gap: float) -> dict[str, float]:
    forward = Stopwatch()
    before = after = 0.0
    process, thread = time.process_time(), time.thread_time()
    for _ in range(steps):
        began = time.perf_counter()
        service.run_step(forward, tokens)
        ended = time.perf_counter()
        before += forward.called - began
        after += ended - forward.called
        time.sleep(gap)  # where an engine waits for the device and others may have the interpreter
    beside = time.process_time() - process - (time.thread_time() - thread)
    return {"before": before / steps * 1e6, "after": after / steps * 1e6, "beside": beside / steps * 1e6}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gap-us", type=float, default=500.0, help="what lies between two steps")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=None, help="folder; default: one named after the GPU")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    if min(options.steps, options.rounds) < 1 or options.gap_us < 0:
        parser.error("--steps and --rounds are positive, --gap-us is not negative")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
