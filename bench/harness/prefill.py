"""A long prompt beside decoding: what streaming past the pool takes, and what it leaves of the decode set."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from bench.harness.link import Link
from bench.harness.mapping import mapped
from bench.harness.measure import missed_pairs, start_anew, synchronize, warmed
from bench.harness.routing import Routing, load_trace
from bench.harness.stack import Forward, Stack
from bench.shapes import MoeShape
from ziggurat.residency.service import ExpertService, StepTokens

HITS_OVER = 50  # decode steps before the prompt and after it
_REPEATS = 2


@dataclass(slots=True)
class Prompt:
    """What one service did with a prompt. ms: of its passes. bytes: streamed in one of them. out: [T, H]. links: GB/s,
    sampled before and after each pass."""

    ms: list[float]
    bytes: float
    out: torch.Tensor
    links: list[float] = field(default_factory=list)


def prompt_routing(path: Path, shape: MoeShape, tokens: int) -> Routing:
    """One step: a trace's sequences one behind the other, mapped onto `shape`, as tokens of one prompt."""
    positions = load_trace(path).shape[1]
    sequences = -(-tokens // positions)
    found = mapped(path, shape, sequences, positions)
    ids = found.ids.transpose(1, 2, 0, 3).reshape(shape.layers, sequences * positions, shape.top_k)[
        :, :tokens
    ]
    return Routing(np.ascontiguousarray(ids[None]), shape.experts, f"{found.source}, {tokens} tokens at once")


def serve_prompt(service: ExpertService, stack: Stack, link: Link | None = None) -> Prompt:
    """Run the prompt once to warm up and then a few times, outside of any graph, as an engine runs long prompts."""
    forward = Forward(stack, service.moe)
    tokens = StepTokens(stack.tokens, np.ones(stack.tokens, dtype=np.bool_), eager=True)
    ms: list[float] = []
    links: list[float] = []
    before = 0.0
    for number in range(1 + _REPEATS):
        stack.load(0)
        synchronize(stack.device)
        if number == 1:
            before = _staged_bytes(service)
        started = time.perf_counter()
        result = service.run_step(forward, tokens)
        synchronize(stack.device)
        ms.append((time.perf_counter() - started) * 1e3)
        if link is not None:
            links.append(link.sample())
    return Prompt(ms[1:], (_staged_bytes(service) - before) / _REPEATS, result.value.clone(), links)


def hit_rates(
    service: ExpertService,
    decode: Stack,
    routing: Routing,
    warm: int,
    prompt: Stack,
    link: Link | None = None,
) -> dict[str, Any]:
    """Hits of decode steps before the prompt and after it, and of the same later steps without a prompt between."""
    graph = decode.device.type == "cuda"
    rates: dict[str, list[float]] = {}
    found: Prompt | None = None
    for name in ("undisturbed", "with_prompt"):
        start_anew(service)
        forward = warmed(service, decode, routing, warm, graph=graph)
        _hits(service, forward, decode, 0, warm)
        first = _hits(service, forward, decode, warm, warm + HITS_OVER)
        if name == "with_prompt":
            found = serve_prompt(service, prompt, link)
        rates[name] = [first, _hits(service, forward, decode, warm + HITS_OVER, warm + 2 * HITS_OVER)]
    assert found is not None
    return {
        "steps": HITS_OVER,
        "before": round(rates["with_prompt"][0], 4),
        "after": round(rates["with_prompt"][1], 4),
        "after_without_prompt": round(rates["undisturbed"][1], 4),
        "prompt": found,
    }


def _hits(service: ExpertService, forward: Forward, stack: Stack, first: int, last: int) -> float:
    """Share of the pairs of these steps whose expert was in the pool."""
    before = missed_pairs(service)
    for step in range(first, last):
        stack.load(step)
        service.run_step(forward, StepTokens(stack.tokens))
    missed = missed_pairs(service) - before
    return 1 - missed / ((last - first) * stack.ids.numel())


def _staged_bytes(service: ExpertService) -> float:
    service.collect()
    name = "ziggurat_fetched_bytes_total"
    return sum(service.metrics.value(name, source, "staging") for source in ("arena", "pack"))


def report(resident: Prompt, streamed: Prompt, hits: dict[str, Any], link: float | None) -> dict[str, Any]:
    """What goes into a result file; link: the best GB/s of the whole process."""
    work, took = median(resident.ms), median(streamed.ms)
    found: dict[str, Any] = {
        "tokens": resident.out.shape[0],
        "resident_ms": round(work, 3),
        "streamed_ms": round(took, 3),
        "streamed_gib": round(streamed.bytes / 2**30, 3),
        "same_bits": torch.equal(resident.out.view(torch.int16), streamed.out.view(torch.int16)),
        "decode_hits": hits,
    }
    if link is not None:
        beside = mean(streamed.links) if streamed.links else link
        link_ms, best_ms = streamed.bytes / beside / 1e6, streamed.bytes / link / 1e6
        found |= {
            "link_gb_per_s": round(beside, 2),
            "links_gb_per_s": streamed.links,
            "link_ms": round(link_ms, 3),
            "ratio": round(took / max(work, link_ms), 4),
            "ratio_to_best_link": round(took / max(work, best_ms), 4),
        }
    return found
