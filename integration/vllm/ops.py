"""The tiered MoE layer as one opaque torch op.

``torch.compile`` must not trace into residency decisions, so a layer is one op with a fake implementation. It is found
by vLLM's own layer name through the forward context: a number would be baked into compiled artefacts that another
process, with other numbers, loads from the compile cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.library import Library

if TYPE_CHECKING:
    from ziggurat.integration.vllm.method import TieredMoEMethod

_SCHEMA = "moe(Tensor x, Tensor topk_weights, Tensor topk_ids, str layer_name) -> Tensor"
_library: Library | None = None


def _moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    from vllm.forward_context import get_forward_context

    method: TieredMoEMethod = get_forward_context().no_compile_layers[layer_name].routed_experts.quant_method
    return method.tiered.moe(method.layer_index, x, topk_weights, topk_ids)


def _moe_fake(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    return torch.empty_like(x)


def register_ops() -> None:
    """Define ``torch.ops.ziggurat.moe`` once per process."""
    global _library
    if _library is not None:
        return
    library = Library("ziggurat", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("moe", _moe, "CompositeExplicitAutograd")
    library._register_fake("moe", _moe_fake)
    _library = library
