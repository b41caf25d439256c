"""vLLM's own fused MoE kernels, called with random weights, to stand beside ours. Imports vLLM when called.

`triton`: the bfloat16 kernel that serves unquantized models. `marlin`: MXFP4 weights and bfloat16 activations, which
vLLM's own choice of a backend takes for MXFP4 models on Hopper.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.shapes import MoeShape
from ziggurat.kernels.geometry import ExpertGeometry

#: x [T, H], topk_weights float32 [T, k], topk_ids int32 [T, k] -> [T, H]
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """layers: one callable for each layer's worth of weights. expert_bytes: codes and scales of one expert."""

    name: str
    layers: tuple[Layer, ...]
    expert_bytes: int


def _quiet() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def triton_bf16(shape: MoeShape, pool: torch.Tensor, slots: torch.Tensor) -> Peer:
    """vLLM's Triton kernel over the rows of a pool of `bf16` rows: the same weights at the same addresses.

    pool: uint8 [S, stride]. slots: int64 [layers, E] on the host, each layer's slots rising by one from expert to
    expert. ImportError without vLLM.
    """
    _quiet()
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    geometry = ExpertGeometry(shape.hidden, shape.intermediate)
    stride = pool.shape[1] // 2
    numbers = pool.view(torch.bfloat16)

    def weights(first: int, offset: int, rows: int, columns: int) -> torch.Tensor:
        return numbers.as_strided(
            (shape.experts, rows, columns), (stride, columns, 1), first * stride + offset
        )

    def layer(first: int) -> Layer:
        (n13, k13), (n2, k2) = geometry.w13_shape, geometry.w2_shape
        w13, w2 = weights(first, 0, n13, k13), weights(first, n13 * k13, n2, k2)
        return lambda x, topk_weights, topk_ids: fused_experts(x, w13, w2, topk_weights, topk_ids)

    return Peer("vLLM Triton bf16", tuple(layer(int(row[0])) for row in slots), 2 * shape.weights)


def marlin_mxfp4(shape: MoeShape, layers: int, device: torch.device) -> Peer:
    """vLLM's Marlin MoE kernel over random weights already in its own order. ImportError without vLLM."""
    _quiet()
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    e, h, i = shape.experts, shape.hidden, shape.intermediate
    workspace = marlin_make_workspace_new(device, 4)

    def codes(inputs: int, outputs: int) -> torch.Tensor:
        return torch.randint(
            -(2**31), 2**31 - 1, (e, inputs // 16, outputs * 2), dtype=torch.int32, device=device
        )

    def scales(inputs: int, outputs: int) -> torch.Tensor:
        exponents = torch.randint(119, 121, (e, inputs // 32, outputs), dtype=torch.uint8, device=device)
        return exponents.view(torch.float8_e8m0fnu)

    def layer() -> Layer:
        w13, w2, s13, s2 = codes(h, 2 * i), codes(i, h), scales(h, 2 * i), scales(i, h)

        def run(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            fused_marlin_moe(
                x,
                w13,
                w2,
                None,
                None,
                s13,
                s2,
                topk_weights,
                topk_ids,
                quant_type_id=scalar_types.float4_e2m1f.id,
                moe_sum=ops.moe_sum,
                workspace=workspace,
                output=out,
            )
            return out

        return run

    return Peer("vLLM Marlin MXFP4", tuple(layer() for _ in range(layers)), shape.weights * 17 // 32)
