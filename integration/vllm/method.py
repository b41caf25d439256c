"""The quantization method of a tiered MoE layer: no parameters, compute through the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from ziggurat.integration.vllm.tiered import TieredModel


def _cpu_select_experts() -> Any | None:
    """vLLM 0.24's CPU routing. Its modular path needs an operator that the CPU build lacks; 0.32 has a CPU router."""
    if not current_platform.is_cpu():
        return None
    try:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts
    except ImportError:
        return None
    return select_experts


# Resolved here, since torch.compile traces through the methods below and cannot trace an import.
_SELECT_EXPERTS = _cpu_select_experts()


class TieredMoEMethod(FusedMoEMethodBase):
    """Registers nothing with vLLM: rows live in the tiers, never in ``nn.Parameter`` s that a loader could move."""

    def __init__(self, moe_config: Any, tiered: TieredModel, prefix: str) -> None:
        super().__init__(moe_config)
        self.tiered = tiered
        self.prefix = prefix
        self.layer_index = -1

    @property
    def is_monolithic(self) -> bool:
        return _SELECT_EXPERTS is not None

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        return None

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.layer_index = self.tiered.register_layer(
            layer, self.prefix, num_experts, hidden_size, intermediate_size_per_partition
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch.ops.ziggurat.moe(x, topk_weights, topk_ids, layer.layer_name)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert _SELECT_EXPERTS is not None
        topk_weights, topk_ids = _SELECT_EXPERTS(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return torch.ops.ziggurat.moe(x, topk_weights, topk_ids, layer.layer_name)
