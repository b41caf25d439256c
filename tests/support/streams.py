"""Streamed layers over real packs, on a device whose queues run as far apart as their events allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from support.fake_moe import FakeModel, FakePacks
from support.lazy_device import Device, LazyKernels, LazyPool, Name
from ziggurat.allocators.pageable import PageableArena
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.fetch import Entry, Fetcher
from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.passes import BoolArray, PassMode, PassState, StepState, StepTokens
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.ports import RowPack
from ziggurat.residency.slots import SlotPool, SlotTable
from ziggurat.residency.streaming.layers import StreamedLayers
from ziggurat.residency.streaming.ring import StagingRing


def lazy_kernels(packs: FakePacks, device: Device, part_tokens: int = 1 << 30) -> LazyKernels:
    """Kernels for the experts of `packs` in the queue of `device`."""
    g = packs.geometry
    sizes = ExpertGeometry(g.hidden, g.intermediate)
    kernels = LazyKernels(
        get_codec(packs.codec), sizes, g.experts, g.top_k, clamp=g.clamp, part_tokens=part_tokens
    )
    kernels.device = device
    return kernels


@dataclass
class Stream:
    """Streamed layers with their surroundings."""

    layers: StreamedLayers
    slots: SlotPool
    cache: HostCache
    fetcher: Fetcher
    state: DeviceState
    ring: StagingRing

    @classmethod
    def over(
        cls,
        packs: FakePacks,
        *,
        early: Name = "copies",
        slots: int = 1,
        parts: int = 2,
        rows: int = 2,
        places: int = 16,
        staging: int = 2,
        part_tokens: int = 1 << 30,
        follows: bool = True,
        pack: RowPack | None = None,
    ) -> Stream:
        pack = pack or packs.open()
        g, stride = packs.geometry, pack.header.stride
        device = Device(early)
        arena = PageableArena(places, stride)
        arena.tensor.fill_(0xFF)
        cache = HostCache(pack, arena, make_policy("lfu-decay"), experts=g.experts, staging=staging)
        table = SlotTable(g.layers, g.experts, slots, packs.codec)
        pool = SlotPool(LazyPool(device, slots, stride), table, make_policy("lfu-decay"))
        fetcher = Fetcher(pool, cache)
        state = DeviceState(g.layers, g.experts, 128, torch.device("cpu"))
        ring = StagingRing([LazyPool(device, rows, stride, follows=follows) for _ in range(parts)])
        kernels = lazy_kernels(packs, device, part_tokens)
        layers = StreamedLayers(g, kernels, pool.pool, fetcher, state, ring)
        return cls(layers, pool, cache, fetcher, state, ring)

    def hold(self, keys: Iterable[int]) -> None:
        """Give rows a slot."""
        epoch = self.cache.open_epoch()
        self.fetcher.fetch(dict.fromkeys(keys, 1.0), blocked=(), epoch=epoch, entry=Entry.SEED)
        self.fetcher.drain()
        self.cache.close_epoch(epoch)

    def step(
        self,
        model: FakeModel,
        x: torch.Tensor,
        *,
        prefill: BoolArray | None = None,
        blind: bool | None = None,
        padding: int = 0,
    ) -> tuple[torch.Tensor, PassState]:
        """One streamed pass over x [T, H]; what it returned and what it learned."""
        tokens = StepTokens(len(x), prefill, eager=True)
        step = StepState(tokens, self.cache.open_epoch())
        state = PassState(PassMode.INLINE, first=True, step=step)
        padded = torch.cat([x, torch.full((padding, x.shape[1]), float("nan"))])
        self.state.arm(len(x), prefill)
        try:
            self.layers.begin(self.slots.table.numpy, tokens, step.epoch, blind=blind)
            try:
                value = model.forward(padded, lambda layer, *call: self.layers.run(state, layer, *call))
            finally:
                self.layers.end()
        finally:
            self.fetcher.drain()
            self.cache.close_epoch(step.epoch)
        return value[: len(x)], state
