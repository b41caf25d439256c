"""Layers that admit their own experts, on a device, beside the twin on the CPU and a pool that has every row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from support.admissions import Call, copied, over_rows
from support.layers import random_layer
from ziggurat.kernels.admission import Admission
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.cpu.admission import admit, copy_rows
from ziggurat.kernels.cpu.layer import CpuLayerKernels
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.lookahead import Lookahead

if TYPE_CHECKING:
    from ziggurat.residency.ports import LayerKernels


def on_device(a: Admission, device: torch.device) -> Admission:
    """The same contents there; the arena in memory that the device reads, which the host may write."""
    if device.type == "cpu":
        return copied(a)
    parts: dict[str, Any] = {f.name: getattr(a, f.name) for f in fields(a)}
    moved: dict[str, Any] = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in parts.items()}
    moved["arena"] = a.arena.clone().pin_memory()
    return Admission(**moved)


@dataclass
class Admitted:
    """Layers of one shape: kernels, an admission of theirs, its twin, and a pool with the row of key k in slot k."""

    kernels: LayerKernels
    device: torch.device
    dtype: torch.dtype
    hidden: int
    top_k: int
    everything: torch.Tensor
    ours: Admission
    twin: Admission

    @classmethod
    def make(
        cls,
        kind: str,
        codec: str,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        *,
        layers: int,
        slots: int,
        max_tokens: int,
        absent: Iterable[int] = (),
    ) -> Admitted:
        """sizes: hidden, intermediate, experts, top_k."""
        hidden, intermediate, experts, top_k = sizes
        geometry = ExpertGeometry(hidden, intermediate)
        rows = random_layer(codec, hidden, intermediate, layers * experts, top_k).rows
        kernels: LayerKernels
        if kind == "cpu":
            device = torch.device("cpu")
            kernels = CpuLayerKernels(get_codec(codec), geometry, experts, top_k)
        else:
            from ziggurat.kernels.cuda.layer import CudaLayerKernels

            device = torch.device("cuda", torch.cuda.current_device())
            kernels = CudaLayerKernels(
                codec, geometry, experts, top_k, dtype=dtype, device=device, max_tokens=max_tokens
            )
        twin = over_rows(rows, layers, slots, absent=absent)
        return cls(kernels, device, dtype, hidden, top_k, rows.to(device), on_device(twin, device), twin)

    def inputs(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] and weights [T, k] on the device."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, self.hidden, generator=generator).to(self.dtype)
        weights = torch.rand(tokens, self.top_k, generator=generator)
        return x.to(self.device), weights.to(self.device)

    def launch(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        live: torch.Tensor,
        prefill: torch.Tensor | None,
        layer: int,
        tally: torch.Tensor | None = None,
        lookahead: Lookahead | None = None,
        guesses: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """An admitted layer; everything on the device. guesses: ids [T, N] of the next layer."""
        a = self.ours
        return self.kernels.run(
            x,
            weights,
            ids,
            slots=a.table[layer],
            pool=a.pool,
            live=live,
            prefill=prefill,
            counts=None,
            tally=tally,
            admission=a,
            layer=layer,
            lookahead=lookahead,
            guess=None if guesses is None else lambda x: guesses,
        )

    def follow(self, one: Call) -> None:
        """The twin's part of a call."""
        admit(self.twin, one.layer, one.ids, one.live, one.prefill)
        copy_rows(self.twin)

    def expected(
        self, x: torch.Tensor, weights: torch.Tensor, one: Call, tally: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer over the pool that has every row, but for experts that the twin has no slot for."""
        experts = self.twin.experts
        keys = torch.arange(one.layer * experts, (one.layer + 1) * experts, dtype=torch.int32)
        slots = torch.where(self.twin.table[one.layer] >= 0, keys, -1)
        return self.kernels.run(
            x,
            weights,
            one.ids.to(self.device),
            slots=slots.to(self.device),
            pool=self.everything,
            live=one.live.to(self.device),
            prefill=None,
            counts=None,
            tally=tally,
        )
