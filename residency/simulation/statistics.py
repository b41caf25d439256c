"""What a trace is like, before any policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ziggurat.residency.simulation.trace import Trace


def describe(trace: Trace) -> dict[str, Any]:
    """Sizes, what the file says about itself, and for each layer: experts used, how many of the most used ones take
    half of the pairs, and how much of a token's set the token before it used, beside what chance would give."""
    lines = [_layer(trace, layer) for layer in range(trace.layers)]
    recorded = trace.batches is not None
    return {
        "name": trace.name,
        "sequences": trace.sequences,
        "positions": trace.positions,
        "tokens": trace.tokens,
        "prompt_tokens": int(trace.prompts.sum() if trace.prefill is None else trace.prefill.sum()),
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "routed_pairs": trace.tokens * trace.layers * trace.top_k,
        "recorded_steps": len(trace.batches) - 1 if trace.batches is not None and recorded else None,
        "metadata": {key: value for key, value in trace.metadata.items() if key != "layers"},
        "repeat": round(float(np.mean([line["repeat"] for line in lines])), 4),
        "by_layer": lines,
    }


def _layer(trace: Trace, layer: int) -> dict[str, Any]:
    live = np.arange(trace.positions) < trace.lengths[:, None]
    ids = trace.ids[:, :, layer]
    pairs = np.bincount(ids[live].reshape(-1), minlength=trace.experts)
    ranked = np.cumsum(np.sort(pairs)[::-1])
    share = pairs / max(1, int(pairs.sum()))
    both = live[:, 1:] & live[:, :-1]
    again = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(axis=3)[both]
    return {
        "layer": trace.layer_ids[layer],
        "used": int((pairs > 0).sum()),
        "half_on": int(np.searchsorted(ranked, ranked[-1] / 2) + 1),
        "repeat": round(float(again.mean()), 4) if again.size else 0.0,
        "chance": round(float((share * np.minimum(1.0, share * trace.top_k)).sum()), 4),
    }
