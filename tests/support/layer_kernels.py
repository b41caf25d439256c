"""A layer under test: some implementation of LayerKernels over the rows of a support layer, on its device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from support.layers import Batch, Layer, placed
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.cpu.layer import CpuLayerKernels

if TYPE_CHECKING:  # at run time the kernels need nothing of the runtime
    from ziggurat.residency.ports import LayerKernels

#: For pytest.mark.parametrize: every implementation.
KINDS = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
CUDA_TYPES = {
    "w2": (torch.bfloat16, torch.float16),
    "fp4": (torch.bfloat16, torch.float16),
    "bf16": (torch.bfloat16,),
}
#: (codec, dtype) that every implementation computes.
TYPES = tuple((codec, dtype) for codec, dtypes in CUDA_TYPES.items() for dtype in dtypes)


@dataclass
class Subject:
    """Kernels with the layer that they compute, and a pool that has all of its experts."""

    kernels: LayerKernels
    layer: Layer
    device: torch.device
    dtype: torch.dtype
    pool: torch.Tensor
    slots: torch.Tensor

    def live(self, tokens: int) -> torch.Tensor:
        return torch.tensor([tokens], dtype=torch.int32, device=self.device)

    def run(
        self,
        batch: Batch,
        *,
        live: int | None = None,
        pool: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        prefill: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        tally: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The whole layer, with every expert unless told otherwise; on the CPU."""
        batch = batch.to(self.device)
        out = self.kernels.run(
            batch.x,
            batch.weights,
            batch.ids,
            slots=self.slots if slots is None else slots,
            pool=self.pool if pool is None else pool,
            live=self.live(len(batch.x) if live is None else live),
            prefill=None if prefill is None else prefill.to(self.device),
            counts=counts,
            tally=tally,
        )
        assert out.shape == batch.x.shape
        assert out.dtype == batch.x.dtype
        return out.cpu()

    def run_in_chunks(
        self, batch: Batch, chunks: Sequence[Iterable[int]], live: int | None = None
    ) -> torch.Tensor:
        """The layer with some of its experts at a time, each chunk in a small pool of its own; on the CPU."""
        batch = batch.to(self.device)
        tokens = self.live(len(batch.x) if live is None else live)
        self.kernels.begin(batch.x, batch.ids, tokens)
        for number, chunk in enumerate(chunks):
            pool, slots = placed(self.layer, self.device, order=chunk, seed=number)
            self.kernels.add(batch.x, batch.ids, tokens, slots=slots, pool=pool)
        return self.kernels.finish(batch.x, batch.weights, batch.ids, tokens).cpu()


def subject(kind: str, layer: Layer, dtype: torch.dtype, max_tokens: int = 64) -> Subject:
    """The implementation called `kind`: cpu or cuda."""
    kernels: LayerKernels
    if kind == "cpu":
        device = torch.device("cpu")
        kernels = CpuLayerKernels(
            get_codec(layer.codec), layer.geometry, layer.experts, layer.top_k, clamp=layer.clamp
        )
    else:
        from ziggurat.kernels.cuda.layer import CudaLayerKernels

        device = torch.device("cuda", torch.cuda.current_device())
        kernels = CudaLayerKernels(
            layer.codec,
            layer.geometry,
            layer.experts,
            layer.top_k,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            clamp=layer.clamp,
        )
    pool, slots = placed(layer, device)
    return Subject(kernels, layer, device, dtype, pool, slots)
