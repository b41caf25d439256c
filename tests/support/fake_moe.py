"""A tiny Mixture-of-Experts model in plain torch, with real packs of its experts and services over them.

Its experts are strong and its router sharp, so that a wrong or missing expert changes the routing of later layers.
Every operation outside the experts works row by row, so that a token's bits do not depend on its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import write_checkpoint
from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.pool import CpuPool
from ziggurat.integration.packing import encoder_for
from ziggurat.kernels.codecs.base import DecodedExpert
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.cpu.layer import CpuLayerKernels
from ziggurat.kernels.cpu.moe import combine, expert_ffn
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.consensus import Consensus, LocalConsensus
from ziggurat.residency.factory import geometry_of
from ziggurat.residency.inline.choice import MappedArena
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import PassPath, StepResult, StepTokens
from ziggurat.residency.ports import RowArena, RowPack, RowPool
from ziggurat.residency.service import ExpertService, ServiceGeometry
from ziggurat.residency.streaming.ring import StagingRing
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.pack import Pack, RowRequest
from ziggurat.stores.progress import NoProgress

Moe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]

ON_DEVICE = (
    False  # whether services that say nothing run their layers as on a device; the fixture `layers` sets it
)
MAX_TOKENS = 128
PART_TOKENS = 40  # fewer than the tokens of the larger batches
RING = (2, 3)  # parts and rows of staging memory of services whose layers run as on a device
LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 12, 3, 64, 64


@dataclass(frozen=True)
class FakeModel:
    """The model around the experts. router: float32 [layers, experts, hidden]."""

    router: torch.Tensor
    top_k: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def make(cls, seed: int = 0, dtype: torch.dtype = torch.float32) -> FakeModel:
        generator = torch.Generator().manual_seed(seed)
        router = torch.randn(LAYERS, EXPERTS, HIDDEN, generator=generator) * 0.5
        return cls(router, TOP_K, dtype)

    def inputs(self, tokens: int, seed: int = 1) -> torch.Tensor:
        """Hidden states, float32 [tokens, hidden]."""
        return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def route(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [T, H] -> weights float32 [T, k], ids int64 [T, k]."""
        logits = (h[:, None, :] * self.router[layer]).sum(-1)
        weights, ids = torch.softmax(logits, dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: torch.Tensor, moe: Moe, reduce: Reduce = lambda y: y) -> torch.Tensor:
        """Hidden states through all layers: float32 [T, H] -> float32 [T, H]."""
        for layer in range(len(self.router)):
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            weights, ids = self.route(layer, h)
            y = reduce(moe(layer, h.to(self.dtype), weights, ids))
            x = x + y.float()
        return x


@dataclass(frozen=True)
class FakePacks:
    """Packs of the model's experts, one per rank, and the checkpoint they were made from."""

    checkpoint: Checkpoint
    paths: tuple[Path, ...]
    codec: str

    @property
    def size(self) -> int:
        return len(self.paths)

    @property
    def geometry(self) -> ServiceGeometry:
        return geometry_of(self.checkpoint, self.size)

    def open(self, rank: int = 0) -> Pack:
        return Pack.open(self.paths[rank])

    @functools.cached_property
    def decoded(self) -> list[dict[tuple[int, int], DecodedExpert]]:
        """Every expert of every rank, all resident: rank -> (layer, expert) -> weights."""
        g = self.geometry
        codec = get_codec(self.codec)
        ranks = []
        for rank in range(self.size):
            pack = self.open(rank)
            arena = PageableArena(g.rows, pack.header.stride)
            wanted = [RowRequest(*g.split(key), arena.view(key)) for key in range(g.rows)]
            assert all(result.error is None for result in pack.read_rows(wanted))
            pack.close()
            sizes = ExpertGeometry(g.hidden, g.intermediate)
            ranks.append({g.split(key): codec.decode(arena.tensor[key], sizes) for key in range(g.rows)})
        return ranks

    def resident(self, rank: int = 0) -> Moe:
        """The layer with every expert at hand, one token and one choice at a time: what tiers must reproduce."""
        experts = self.decoded[rank]

        def moe(layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            rows = []
            for token, chosen in enumerate(ids.tolist()):
                rows.append(torch.cat([expert_ffn(x[token : token + 1], experts[layer, e]) for e in chosen]))
            return combine(torch.stack(rows), weights, x.dtype)

        return moe

    def whole(self) -> Moe:
        """The layer of all ranks, added in order."""

        def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            total = self.resident(0)(layer, h, weights, ids)
            for rank in range(1, self.size):
                total += self.resident(rank)(layer, h, weights, ids)
            return total

        return moe

    def reference(self, model: FakeModel, x: torch.Tensor) -> torch.Tensor:
        """The hidden states of the all-resident model."""
        return model.forward(x, self.whole())


def make_packs(folder: Path, tp_size: int = 1, codec: str = "bf16") -> FakePacks:
    """Write a checkpoint and pack it for `tp_size` ranks."""
    write_checkpoint(
        folder / "model",
        gain=3.0,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        vocab=32,
    )
    checkpoint = Checkpoint.open(folder / "model")
    encoder = encoder_for(checkpoint, codec)
    (folder / "packs").mkdir()
    paths = build_pack(checkpoint, encoder, folder / "packs", tp_size, range(tp_size), NoProgress())
    return FakePacks(checkpoint, tuple(paths), codec)


def config_for(folder: Path, *, direct_layers: Sequence[int] = (), **sections: dict[str, Any]) -> TiersConfig:
    """A configuration whose packs lie in `folder`; sections override."""
    disk, device = {"path": str(folder), "readers": 2}, {"direct_layers": list(direct_layers)}
    values: dict[str, Any] = {"tiers": {"disk": disk, "device": device}}
    return TiersConfig.from_mapping({**values, **sections})


def open_tiers(
    packs: FakePacks,
    *,
    slots: int,
    places: int | None = 16,
    rank: int = 0,
    consensus: Consensus | None = None,
    pack: RowPack | None = None,
    eviction: str = "lfu-decay",
    policy: dict[str, Any] | None = None,
    miss: dict[str, Any] | None = None,
    heat: dict[str, Any] | None = None,
    on_device: bool | None = None,
    inline: bool = False,
    pool: RowPool | None = None,
    direct: Sequence[int] = (),
    arena: RowArena | None = None,
    **options: Any,
) -> ExpertService:
    """A service over real packs, arena and pool. Both are filled with 0xFF, which is NaN in every codec.

    on_device: run layers through kernels and static tensors as on a device, only on the CPU. inline: these kernels
    see the arena, so that layers can fetch rows by themselves. direct: layers that they read there in place.
    arena: instead of one of `places`; it is left as it is.
    """
    pack = pack or packs.open(rank)
    pool = pool or CpuPool(slots, pack.header.stride)
    pool.tensor.fill_(0xFF)
    if arena is None and places is not None:
        arena = PageableArena(places, pack.header.stride)
        arena.tensor.fill_(0xFF)
    config = config_for(
        packs.paths[0].parent,
        direct_layers=direct,
        policy={"eviction": eviction} if policy is None else policy,
        miss=miss or {},
        heat=heat or {},
    )
    g = packs.geometry
    if (inline or direct) and arena is not None:
        options = {"mapped": MappedArena(arena.tensor), **options}
    if inline or (ON_DEVICE if on_device is None else on_device):
        sizes = ExpertGeometry(g.hidden, g.intermediate)
        kernels = CpuLayerKernels(
            get_codec(packs.codec), sizes, g.experts, g.top_k, clamp=g.clamp, part_tokens=PART_TOKENS
        )
        parts, rows = RING
        ring = StagingRing([CpuPool(rows, pack.header.stride) for _ in range(parts)])
        options = {"kernels": kernels, "ring": ring, "max_tokens": MAX_TOKENS, **options}
    return ExpertService(
        config,
        g,
        get_codec(packs.codec),
        pack,
        pool,
        arena,
        consensus=consensus or LocalConsensus(),
        metrics=TierMetrics(),
        **options,
    )


@contextmanager
def tiers(packs: FakePacks, **options: Any) -> Iterator[ExpertService]:
    """`open_tiers`, closed at the end."""
    service = open_tiers(packs, **options)
    try:
        yield service
    finally:
        service.close()


@dataclass
class Passes:
    """Runs the model's steps through a service and remembers the paths of its passes."""

    model: FakeModel
    service: ExpertService
    reduce: Reduce = lambda y: y

    def __post_init__(self) -> None:
        self.paths: list[PassPath] = []

    def step(
        self, x: torch.Tensor, tokens: StepTokens | None = None, *, padding: int = 0
    ) -> StepResult[torch.Tensor]:
        """One step over x [T, H]; `padding` rows of NaN follow the live ones and are cut off again."""
        live = x.shape[0]
        padded = torch.cat([x, torch.full((padding, x.shape[1]), float("nan"))])
        self.paths = []

        def forward(path: PassPath) -> torch.Tensor:
            self.paths.append(path)
            return self.model.forward(padded, self.service.moe, self.reduce)[:live]

        return self.service.run_step(forward, tokens or StepTokens(live))


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and bits; NaNs compare by their bits, too."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
