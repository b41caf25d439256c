"""Guesses of the next layer's experts, to drive look-ahead with: recorded beside the routing, or drawn.

Guesses int32 [steps, layers, tokens, N], the likeliest first; -1 where there is none. Those of a layer are known when
the layer before it has got the input of its experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.harness.mapping import pairs_of
from bench.harness.routing import IdArray, Routing, TraceError
from bench.shapes import MoeShape


def mapped_guesses(path: Path, shape: MoeShape, tokens: int, steps: int, width: int) -> IdArray:
    """What `mapping.mapped` of the same trace would have been guessed to route to: an expert of the larger model stands
    for two recorded choices, so a guess of it is two recorded guesses, of the trace's layer and of the next one.

    The first layer of the trace has no layer before it: there is no guess where it stands, and where it is the *next*
    layer its own choices, which are older than the rest, are taken. TraceError for a trace without guesses.
    """
    with np.load(path) as file:
        if "guesses" not in file or "topk_ids" not in file:
            raise TraceError(f"{path.name} holds no guesses; bench/lookahead.py --trace writes such a file")
        guesses, routed = file["guesses"].astype(np.int32), file["topk_ids"].astype(np.int32)
    sequences, _, layers, _ = guesses.shape
    recorded = 1 << int(routed.max()).bit_length()
    groups = shape.experts // recorded
    made = np.full((steps, shape.layers, tokens, width), -1, dtype=np.int32)
    for layer in range(1, shape.layers):
        copy, here = divmod(layer, layers)
        if here == 0:
            continue
        followed = (np.arange(tokens) + copy * tokens) % sequences
        after = (here + 1) % layers
        first = guesses[followed, :steps, here].swapaxes(0, 1)
        second = (guesses if after else routed)[followed, :steps, after].swapaxes(0, 1) % groups
        k = routed.shape[-1]
        made[:, layer] = pairs_of(first[..., :k], second[..., :k], recorded, groups, width)
    return made


def drawn_guesses(routing: Routing, width: int, recall: float, seed: int = 13) -> IdArray:
    """Each of a token's first `width` choices is guessed with probability `recall`, otherwise some expert."""
    random = np.random.default_rng(seed)
    right = routing.ids[..., :width]
    made = np.where(
        random.random(right.shape) < recall, right, random.integers(0, routing.experts, right.shape)
    ).astype(np.int32)
    made[:, 0] = -1
    return made


def recall_of(guesses: IdArray | None, routing: Routing) -> float | None:
    """Share of the routed experts, in layers that have guesses, that are among their token's; None without any."""
    if guesses is None:
        return None
    there = (guesses >= 0).any(axis=(0, 2, 3))
    hits = (routing.ids[:, there, :, :, None] == guesses[:, there, :, None, :]).any(-1)
    return float(hits.mean()) if hits.size else None
