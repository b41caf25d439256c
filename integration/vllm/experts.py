"""Replaces vLLM's container of routed experts in every model, through vLLM's own out-of-tree registry."""

from __future__ import annotations

from typing import Any

from ziggurat.integration.vllm.errors import SetupError
from ziggurat.integration.vllm.settings import LOAD_FORMAT, tiers_requested

_installed = False


def install_experts() -> None:
    """Register the tiered container; idempotent, since vLLM asserts on a second registration."""
    global _installed
    if _installed:
        return
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from ziggurat.integration.vllm.tiered import building

    stock_weight_loader = RoutedExperts.weight_loader

    # The registry looks classes up by __name__, hence the same name.
    class TieredRoutedExperts(RoutedExperts):
        """Stock behaviour unless the engine asked for tiers."""

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            if not tiers_requested(get_current_vllm_config()):
                return super()._get_quant_method(prefix, quant_config, moe_config)
            from ziggurat.integration.vllm.method import TieredMoEMethod

            tiered = building()
            if tiered is None:
                raise SetupError(
                    f"the engine is configured for tiers but not with --load-format {LOAD_FORMAT}: the experts would "
                    f"stay empty; add --load-format {LOAD_FORMAT} or start with `ziggurat serve`"
                )
            tiered.check_layer(self, prefix, quant_config)
            return TieredMoEMethod(moe_config, tiered, prefix)

        def weight_loader(
            self, param: Any, loaded_weight: Any, weight_name: str, *args: Any, **kwargs: Any
        ) -> Any:
            if not tiers_requested_for(self):
                return stock_weight_loader(self, param, loaded_weight, weight_name, *args, **kwargs)
            raise SetupError(
                f"expert tensor {weight_name} came through vLLM's loader although packs serve the experts; "
                "the checkpoint and the packs disagree about what an expert is"
            )

        weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]  # vLLM's protocol for loaders

    TieredRoutedExperts.__qualname__ = TieredRoutedExperts.__name__
    RoutedExperts.register_oot(TieredRoutedExperts, name="RoutedExperts")
    _installed = True


def tiers_requested_for(layer: Any) -> bool:
    """True if this layer's method is ours."""
    from ziggurat.integration.vllm.method import TieredMoEMethod

    return isinstance(getattr(layer, "quant_method", None), TieredMoEMethod)
