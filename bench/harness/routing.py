"""Routing to drive layers with: recorded from a model, or drawn so that hot experts drift.

A `Routing` holds, for each step, where each token of a batch goes in each layer. What a model's router would do after
a pass with missing experts is not modelled: routing is given, so a replayed step needs one replay and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ziggurat.residency.prediction import PredictionError, load_routing

IdArray = npt.NDArray[np.int32]


class TraceError(Exception):
    """A file that holds no trace, or too short a trace."""


@dataclass(frozen=True, slots=True)
class Routing:
    """ids: int32 [steps, layers, tokens, top_k], the choices of a token distinct. source: where it comes from."""

    ids: IdArray
    experts: int
    source: str

    @property
    def steps(self) -> int:
        return int(self.ids.shape[0])

    @property
    def layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[2])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[3])

    def counts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """int64 [layers, experts], pairs of steps first..last (last excluded)."""
        found = np.zeros((self.layers, self.experts), dtype=np.int64)
        for layer in range(self.layers):
            chosen = self.ids[first:last, layer].reshape(-1)
            found[layer] = np.bincount(chosen, minlength=self.experts)
        return found


def synthetic(
    steps: int,
    layers: int,
    experts: int,
    top_k: int,
    tokens: int,
    *,
    zipf: float = 1.3,
    drift: float = 0.05,
    seed: int = 7,
) -> Routing:
    """Choices by a Zipf law over a hot set that drifts.

    In each layer experts stand in a random order, and the i-th of them is drawn with a weight of (i + 1)^-zipf, without
    replacement for each token. In each step a layer swaps two places of its order with probability `drift`.
    """
    random = np.random.default_rng(seed)
    order = np.stack([random.permutation(experts) for _ in range(layers)])
    # Adding Gumbel noise to log weights and taking the top is drawing without replacement.
    weight = -zipf * np.log(np.arange(1, experts + 1, dtype=np.float32))
    ids = np.empty((steps, layers, tokens, top_k), dtype=np.int32)
    each = np.arange(layers)[:, None, None]
    for step in range(steps):
        for layer in np.flatnonzero(random.random(layers) < drift).tolist():
            one, other = random.integers(0, experts, 2)
            order[layer, [one, other]] = order[layer, [other, one]]
        noise = random.gumbel(size=(layers, tokens, experts)).astype(np.float32)
        places = np.argpartition(weight + noise, -top_k, axis=-1)[..., -top_k:]
        ids[step] = order[each, places]
    return Routing(ids, experts, f"synthetic: zipf {zipf}, drift {drift}, seed {seed}")


def load_trace(path: Path) -> npt.NDArray[np.integer]:
    """The `topk_ids` or `ids` of an .npz: integers [sequences, positions, layers, top_k]; TraceError if it has none."""
    try:
        return load_routing(path)
    except PredictionError as error:
        raise TraceError(str(error)) from error


def adjustable(
    steps: int, layers: int, experts: int, top_k: int, tokens: int, *, hit: float, hot: int, seed: int = 11
) -> Routing:
    """Choices of which a share `hit` falls on `hot` experts of each layer, uniformly; the others go round.

    The round goes over all the other experts, so that by the time one is wanted again a pool with room for the hot ones
    and a few rounds of a step has evicted it. Choices of a token are distinct.
    """
    random = np.random.default_rng(seed)
    order = np.stack([random.permutation(experts) for _ in range(layers)])
    cold = experts - hot
    ids = np.empty((steps, layers, tokens, top_k), dtype=np.int32)
    next_cold = np.zeros(layers, dtype=np.int64)
    for step in range(steps):
        for layer in range(layers):
            count = random.binomial(top_k, 1 - hit, size=tokens)
            for token, wanted in enumerate(np.minimum(count, cold).tolist()):
                away = (next_cold[layer] + np.arange(wanted)) % cold
                next_cold[layer] += wanted
                near = random.choice(hot, top_k - wanted, replace=False)
                ids[step, layer, token] = order[layer, np.concatenate([near, hot + away])]
    return Routing(ids, experts, f"synthetic: {hit:.0%} of the choices on {hot} experts a layer, seed {seed}")


def recorded(path: Path, tokens: int, *, repeat: int = 1, steps: int | None = None) -> Routing:
    """A trace file's sequences decoded side by side: token t of every step belongs to one sequence.

    path: an .npz whose `topk_ids` or `ids` is [sequences, positions, layers, top_k]. repeat: stack that many copies of
    the trace's layers for a deeper model; each copy follows the next sequences, so that copies do not route alike.
    steps: use that many positions, default all. The number of experts is the next power of two above the largest id.

    Raises:
        TraceError: no such trace in the file, or it has fewer sequences than tokens or fewer positions than steps.
    """
    trace = load_trace(path)
    sequences, positions = trace.shape[:2]
    wanted = positions if steps is None else steps
    if tokens > sequences or wanted > positions:
        raise TraceError(
            f"{path.name} has {sequences} sequences of {positions} positions, not {tokens} of {wanted}"
        )
    blocks = [
        trace[(np.arange(tokens) + block * tokens) % sequences, :wanted].transpose(1, 2, 0, 3)
        for block in range(repeat)
    ]
    ids = np.ascontiguousarray(np.concatenate(blocks, axis=1), dtype=np.int32)
    experts = 1 << int(ids.max()).bit_length()
    return Routing(ids, experts, f"{path.name}, layers repeated {repeat} times" if repeat > 1 else path.name)
