"""Mixture-of-Experts layers for tests: rows of random experts, batches, and the layer in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from support.weights import Expert, Weight
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry

#: Rows start on pages, in packs and in pools.
ALIGNMENT = 4096


@dataclass(eq=False)
class Layer:
    """The experts of one layer.

    Attributes:
        rows: uint8 [E, stride], on the CPU; what pads a row is garbage.
    """

    codec: str
    geometry: ExpertGeometry
    experts: int
    top_k: int
    clamp: float | None
    rows: torch.Tensor
    _decoded: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def stride(self) -> int:
        return self.rows.shape[1]

    def weights(self, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 w13 and w2 of one expert, kept."""
        key = (expert, str(device))
        if key not in self._decoded:
            decoded = get_codec(self.codec).decode(self.rows[expert], self.geometry)
            self._decoded[key] = decoded.w13.to(device), decoded.w2.to(device)
        return self._decoded[key]


def pack(
    codec: str, geometry: ExpertGeometry, top_k: int, experts: Iterable[Expert], clamp: float | None = None
) -> Layer:
    """A layer of these experts."""
    encoder = get_codec(codec)
    nbytes = encoder.row_bytes(geometry)
    stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
    rows = []
    for expert in experts:
        row = torch.full((stride,), 0xFF, dtype=torch.uint8)
        encoder.encode(expert, 1, {0: row[:nbytes]})
        rows.append(row)
    return Layer(codec, geometry, len(rows), top_k, clamp, torch.stack(rows))


@lru_cache(maxsize=4)
def random_experts(hidden: int, intermediate: int, experts: int, seed: int) -> tuple[Expert, ...]:
    """Normally distributed weights that keep the size of what they multiply; a few channels are much larger."""
    generator = torch.Generator().manual_seed(seed)

    def weight(name: str, rows: int, cols: int) -> Weight:
        values = torch.randn(rows, cols, generator=generator) / cols**0.5
        values[:, torch.randint(0, cols, (max(1, cols // 100),), generator=generator)] *= 8
        return Weight(name, "bf16", (rows, cols), values.bfloat16())

    def expert() -> Expert:
        gate, up = (weight(name, intermediate, hidden) for name in ("w1", "w3"))
        return Expert(gate, up, weight("w2", hidden, intermediate))

    return tuple(expert() for _ in range(experts))


@lru_cache(maxsize=64)
def random_layer(
    codec: str,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    clamp: float | None = None,
    seed: int = 0,
) -> Layer:
    """A layer of random_experts; the same for every codec, but for what the codec makes of them."""
    source = random_experts(hidden, intermediate, experts, seed)
    return pack(codec, ExpertGeometry(hidden, intermediate), top_k, source, clamp)


@dataclass(frozen=True)
class Batch:
    """x [T, H], weights float32 [T, k] and ids int64 [T, k] of T tokens."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.x.to(device), self.weights.to(device), self.ids.to(device))

    def pick(self, tokens: Iterable[int]) -> Batch:
        """These tokens, in this order."""
        at = torch.tensor(list(tokens), device=self.x.device)
        return Batch(self.x[at], self.weights[at], self.ids[at])


def random_batch(
    layer: Layer, tokens: int, dtype: torch.dtype, seed: int = 0, outliers: bool = False
) -> Batch:
    """Normal activations, any experts; with outliers, a few channels are a hundred times larger."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(tokens, layer.geometry.hidden, generator=generator)
    if outliers:
        x[:, torch.randint(0, x.shape[1], (max(1, x.shape[1] // 100),), generator=generator)] *= 100
    scores = torch.rand(tokens, layer.experts, generator=generator)
    weights, ids = torch.topk(scores.softmax(dim=1), layer.top_k, dim=1)
    return Batch(x.to(dtype), weights / weights.sum(dim=1, keepdim=True), ids)


def placed(
    layer: Layer,
    device: torch.device,
    *,
    order: Iterable[int] | None = None,
    slots: int | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool and a slot table: the experts of `order` (default: all) in shuffled slots, garbage in all others.

    Returns:
        pool uint8 [slots, stride] and slots int32 [E], -1 for what is not there.
    """
    wanted = list(range(layer.experts)) if order is None else list(order)
    generator = torch.Generator().manual_seed(seed)
    count = len(wanted) + 2 if slots is None else slots
    places = torch.randperm(count, generator=generator)[: len(wanted)]
    pool = torch.full((count, layer.stride), 0xFF, dtype=torch.uint8)
    table = torch.full((layer.experts,), -1, dtype=torch.int32)
    for expert, place in zip(wanted, places.tolist(), strict=True):
        pool[place] = layer.rows[expert]
        table[expert] = place
    return pool.to(device), table.to(device)


Quantize = Callable[[torch.Tensor], torch.Tensor]


def reference(
    layer: Layer, batch: Batch, present: Iterable[int] | None = None, quantize: Quantize | None = None
) -> torch.Tensor:
    """The layer in float64 over the decoded rows: [T, H], on the batch's device.

    Args:
        present: experts that contribute; default all. Ids that are no expert's contribute nothing.
        quantize: what becomes of the inputs of both projections, float64 [P, K] -> float64 [P, K].
    """
    device = batch.x.device
    there = set(range(layer.experts)) if present is None else set(present)
    out = torch.zeros(batch.x.shape, dtype=torch.float64, device=device)
    x = batch.x.double()
    if quantize is not None:
        x = quantize(x)
    for expert in sorted(there & set(batch.ids.flatten().tolist())):
        tokens, choices = torch.nonzero(batch.ids == expert, as_tuple=True)
        w13, w2 = layer.weights(expert, device)
        gate, up = (x[tokens] @ w13.double().T).chunk(2, dim=1)
        if layer.clamp is not None:
            gate, up = gate.clamp(max=layer.clamp), up.clamp(-layer.clamp, layer.clamp)
        hidden = gate * torch.sigmoid(gate) * up
        if quantize is not None:
            hidden = quantize(hidden)
        share = hidden @ w2.double().T
        out.index_add_(0, tokens, share * batch.weights[tokens, choices, None].double())
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals itself, and -0 is not 0."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def mxfp8_of(dtype: torch.dtype) -> Quantize:
    """Rounding to a 16-bit type and then to MXFP8, as the kernels for block-scaled instructions do."""
    from ziggurat.kernels.cpu.mxfp8 import dequantize_mxfp8, quantize_mxfp8

    def quantize(values: torch.Tensor) -> torch.Tensor:
        rounded = values.to(dtype).float().cpu().numpy()
        return torch.from_numpy(dequantize_mxfp8(*quantize_mxfp8(rounded))).to(values.device)

    return quantize


def counted(
    ids: torch.Tensor, experts: int, live: int, prefill: torch.Tensor | None, present: Iterable[int]
) -> tuple[np.ndarray, list[int]]:
    """What counts [E, 2] and tally [2] a layer gives, one pair at a time."""
    counts = np.zeros((experts, 2), np.int32)
    tally = [0, 0]
    there = set(present)
    for token in range(live):
        for expert in ids[token].tolist():
            if not 0 <= expert < experts:
                tally[1] += 1
                continue
            counts[expert, 0] += 1
            counts[expert, 1] += prefill is None or not prefill[token]
            tally[0] += expert not in there
    return counts, tally
