"""Runs steps of a stack through an `ExpertService` and says what they took and what they moved."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch

from bench.harness.link import Link, sampled_before
from bench.harness.routing import Routing
from bench.harness.rows import MemoryPack
from bench.harness.stack import Forward, Stack
from bench.shapes import MoeShape
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.lookahead import LookaheadCounts
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.factory import open_service
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.placement import Placement
from ziggurat.residency.service import ExpertService, StepTokens

_MIB = 1 << 20
_TRACE_OF_HEAT = 1e-3


@dataclass(frozen=True, slots=True)
class Tiers:
    """slots: rows of the pool. places: rows of the host arena. tokens: of the largest step. miss: that section.

    kernels: run layers behind kernels and static tensors also on the CPU, as a GPU always does.
    """

    slots: int
    places: int
    device: torch.device
    tokens: int
    miss: dict[str, Any] = field(default_factory=dict)
    kernels: bool = True

    @property
    def place(self) -> Placement:
        return Placement(self.device, torch.bfloat16, self.tokens, self.kernels)

    def config(self, folder: Path, codec: str) -> TiersConfig:
        return TiersConfig.from_mapping(
            {
                "tiers": {
                    "disk": {"path": str(folder)},
                    "host": {"size": f"{self.places} rows"},
                    "device": {"size": f"{self.slots} rows", "device": str(self.device)},
                },
                "codecs": {"base": codec},
                "miss": self.miss,
                "heat": {"path": None},
            }
        )


@dataclass(slots=True)
class Run:
    """What the measured steps of one pool size did. outputs: [steps, T, H], for comparing bits.

    ms: of each step, from an idle device to an idle device. before_us: of that, until the last pass was launched; with
    one pass the host's part that no work of the device hides. host_us: until `run_step` returned. links: GB/s of the
    link, sampled between the steps.
    """

    slots: int
    ms: list[float] = field(default_factory=list)
    before_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    ahead: LookaheadCounts = field(default_factory=lambda: LookaheadCounts(0, 0, 0, 0))
    outputs: list[torch.Tensor] = field(default_factory=list)
    links: list[float] = field(default_factory=list)

    @property
    def link(self) -> float | None:
        """GB/s of the link while the steps ran, None where there is none."""
        return mean(self.links) if self.links else None

    def same_bits(self, other: Run) -> bool:
        """Whether every output has the same bits as the other run's."""
        return len(self.outputs) == len(other.outputs) > 0 and all(
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(self.outputs, other.outputs, strict=True)
        )

    def summary(self, total_rows: int, stride: int, tokens: int) -> dict[str, Any]:
        """Numbers for a result file; times in milliseconds, a step's tokens over its mean time."""
        steps = len(self.ms)
        clean = [ms for ms, missed in zip(self.ms, self.misses, strict=True) if missed == 0]
        return {
            "coverage": round(self.slots / total_rows, 4),
            "slots": self.slots,
            "steps": steps,
            "step_ms": {
                "median": round(median(self.ms), 4),
                "mean": round(mean(self.ms), 4),
                "p95": round(quantiles(self.ms, n=20)[-1], 4),
                "min": round(min(self.ms), 4),
            },
            "step_ms_without_miss": round(median(clean), 4) if clean else None,
            "tokens_per_s": round(1e3 * tokens / mean(self.ms), 1),
            "missed_pairs_per_step": round(sum(self.misses) / steps, 3),
            "zero_miss_share": round(len(clean) / steps, 4),
            "passes_per_step": round(sum(self.passes) / steps, 3),
            "outcomes": dict(sorted(self.outcomes.items())),
            "rows_per_step": round(self.rows / steps, 3),
            "mib_per_step": round(self.rows * stride / steps / _MIB, 3),
        }


@contextmanager
def service_over(pack: MemoryPack, shape: MoeShape, tiers: Tiers, **options: Any) -> Iterator[ExpertService]:
    """An open, cold service over a pack in memory. options: `open_service`'s."""
    geometry = ServiceGeometry(
        shape.layers, shape.experts, shape.top_k, shape.hidden, shape.intermediate, pack.header.layer_ids
    )
    with tempfile.TemporaryDirectory(prefix="ziggurat-harness-") as name:
        config = tiers.config(Path(name), pack.header.codec)
        codec = get_codec(pack.header.codec)
        service = open_service(config, geometry, pack, codec, place=tiers.place, **options)
        try:
            yield service
        finally:
            service.close()


def run_steps(
    service: ExpertService,
    stack: Stack,
    routing: Routing,
    *,
    warm: int,
    graph: bool,
    keep_outputs: bool = True,
    link: Link | None = None,
) -> Run:
    """Seed the tiers by what the warm-up steps route to, run those, then measure the rest of the routing.

    A step's time runs from an idle device to an idle device: an engine needs a step's logits before the next one.
    graph: capture the stack first; needs a CUDA device. link: sampled between the measured steps.
    """
    forward = warmed(service, stack, routing, warm, graph=graph)
    tokens = StepTokens(stack.tokens)
    for step in range(warm):
        stack.load(step)
        service.run_step(forward, tokens)
    run = Run(service.slots.slots)
    missed_before = missed_pairs(service)  # books what the warm-up steps have done, first
    rows_before, ahead_before = _rows(service), service.lookahead.counts()
    sampled = sampled_before(warm, routing.steps)
    for step in range(warm, routing.steps):
        if link is not None and step in sampled:
            run.links.append(link.sample())
        stack.load(step)
        synchronize(stack.device)
        started = time.perf_counter()
        result = service.run_step(forward, tokens)
        returned = time.perf_counter()
        synchronize(stack.device)
        run.before_us.append((forward.called - started) * 1e6)
        run.host_us.append((returned - started) * 1e6)
        run.ms.append((time.perf_counter() - started) * 1e3)
        run.passes.append(result.passes)
        run.misses.append(missed_pairs(service) - missed_before)
        missed_before += run.misses[-1]
        run.outcomes[result.outcome] += 1
        if keep_outputs:
            run.outputs.append(result.value.clone())
    if link is not None:
        run.links.append(link.sample())
    run.rows = _rows(service) - rows_before
    run.ahead = service.lookahead.counts().since(ahead_before)
    return run


def warmed(service: ExpertService, stack: Stack, routing: Routing, warm: int, *, graph: bool) -> Forward:
    """What runs the stack over tiers that hold what the warm-up steps route to."""
    counts = routing.counts(0, warm)
    service.heat.counts += _TRACE_OF_HEAT  # so that the arena is filled with all the others, too
    for layer in range(routing.layers):
        experts = counts[layer].nonzero()[0]
        service.heat.add(layer, experts, counts[layer, experts])
    service.warm_start()
    service.preheated()
    forward = Forward(stack, service.moe)
    if graph:
        with service.paused():
            forward.capture()
    return forward


def start_anew(service: ExpertService) -> None:
    """Forget what earlier steps have left in pool and heat; the arena keeps its rows."""
    service.resize(service.slots.slots)
    service.heat.counts[:] = 0.0


def missed_pairs(service: ExpertService) -> int:
    """Pairs so far whose expert was not in the pool; of steps that nobody waited for, too."""
    service.collect()
    return int(service.metrics.value("ziggurat_missed_pairs_total"))


def _rows(service: ExpertService) -> int:
    """Rows brought into the pool so far."""
    name = "ziggurat_fetched_rows_total"
    return int(sum(service.metrics.value(name, source, "pool") for source in ("arena", "pack")))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
