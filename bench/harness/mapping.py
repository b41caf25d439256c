"""Recorded routing of a small model as routing of a larger one, made of nothing but recorded choices.

An expert of the larger model stands for a pair of recorded choices of the same token: its expert in one layer of the
trace, and the group of its expert in the next one. With 32 recorded experts and 8 groups that is 256 experts:

    expert = 32 * (choice j of the next layer mod 8) + choice i of this layer

The pairs (i, j) are taken in the order of i + j, the router's first choices first, and a token's first `top_k` distinct
ones are its experts. So how often an expert comes back, how tokens and positions differ, and which experts appear
together is a trained router's doing, and all experts of the larger model are within reach. The layers of the trace
repeat; each repetition follows the next sequences, so that no two layers route alike as long as there are sequences.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.harness.routing import IdArray, Routing, TraceError, load_trace
from bench.shapes import MoeShape


def mapped(path: Path, shape: MoeShape, tokens: int, steps: int) -> Routing:
    """`steps` positions of `tokens` sequences of a trace, as routing of `shape`.

    Raises:
        TraceError: no such trace, too few sequences or positions, or experts that are no multiple of the trace's.
    """
    trace = load_trace(path)
    sequences, positions, layers, top_k = trace.shape
    recorded = 1 << int(trace.max()).bit_length()
    if shape.experts % recorded or top_k * shape.experts // recorded < shape.top_k:
        raise TraceError(
            f"{path.name} has {recorded} experts and top-{top_k}: that does not map onto {shape.experts} and "
            f"top-{shape.top_k}"
        )
    if tokens > sequences or steps > positions:
        raise TraceError(
            f"{path.name} has {sequences} sequences of {positions} positions, not {tokens} of {steps}"
        )
    groups = shape.experts // recorded
    ids = np.empty((steps, shape.layers, tokens, shape.top_k), dtype=np.int32)
    for layer in range(shape.layers):
        copy, here = divmod(layer, layers)
        followed = (np.arange(tokens) + copy * tokens) % sequences
        first = trace[followed, :steps, here].swapaxes(0, 1).astype(np.int32)
        second = trace[followed, :steps, (here + 1) % layers].swapaxes(0, 1).astype(np.int32) % groups
        ids[:, layer] = pairs_of(first, second, recorded, groups, shape.top_k)
    source = f"{path.name} mapped onto {shape.layers} layers of {shape.experts} experts, top-{shape.top_k}"
    return Routing(ids, shape.experts, source)


def pairs_of(first: IdArray, second: IdArray, recorded: int, groups: int, top_k: int) -> IdArray:
    """[..., top_k] distinct experts out of choices [..., k] of two layers."""
    k = first.shape[-1]
    order = sorted(((i, j) for i in range(k) for j in range(k)), key=lambda pair: (sum(pair), pair[0]))
    candidates = [second[..., j] * recorded + first[..., i] for i, j in order]
    # Where all groups of a token are the same, its choices have to go on to the groups behind.
    candidates += [
        (second[..., 0] + step) % groups * recorded + first[..., i]
        for step in range(1, groups)
        for i in range(k)
    ]
    chosen = np.full((*first.shape[:-1], top_k), -1, dtype=np.int32)
    count = np.zeros(first.shape[:-1], dtype=np.int64)
    for candidate in candidates:
        new: npt.NDArray[np.bool_] = (count < top_k) & ~(chosen == candidate[..., None]).any(axis=-1)
        where = np.nonzero(new)
        chosen[(*where, count[where])] = candidate[where]
        count[where] += 1
    return chosen
