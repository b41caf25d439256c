"""Refuses, before anything is loaded, every engine configuration that tiered experts cannot serve exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ziggurat.integration.vllm import compat
from ziggurat.integration.vllm.compute import check_compute
from ziggurat.integration.vllm.errors import SetupError, UnsupportedFeatureError
from ziggurat.integration.vllm.settings import LOAD_FORMAT, read_settings, tiers_requested

_Check = tuple[str, Callable[[Any], bool]]

# (what the user asked for, does this engine configuration ask for it)
_REFUSED: tuple[_Check, ...] = (
    ("--enable-eplb", lambda c: bool(c.parallel_config.enable_eplb)),
    ("--enable-elastic-ep", lambda c: bool(getattr(c.parallel_config, "enable_elastic_ep", False))),
    ("--enable-expert-parallel", lambda c: bool(c.parallel_config.enable_expert_parallel)),
    ("--data-parallel-size above 1", lambda c: c.parallel_config.data_parallel_size > 1),
    ("--pipeline-parallel-size above 1", lambda c: c.parallel_config.pipeline_parallel_size > 1),
    (
        "--prefill-context-parallel-size above 1",
        lambda c: getattr(c.parallel_config, "prefill_context_parallel_size", 1) > 1,
    ),
    (
        "--decode-context-parallel-size above 1",
        lambda c: getattr(c.parallel_config, "decode_context_parallel_size", 1) > 1,
    ),
    ("sequence-parallel MoE", lambda c: bool(getattr(c.parallel_config, "use_sequence_parallel_moe", False))),
    ("--enable-dbo (micro-batching)", lambda c: bool(getattr(c.parallel_config, "use_ubatching", False))),
    (
        "more than one API server (--api-server-count)",
        lambda c: getattr(c.parallel_config, "_api_process_count", 1) > 1,
    ),
    ("LoRA (--enable-lora)", lambda c: c.lora_config is not None),
    ("KV transfer (--kv-transfer-config)", lambda c: c.kv_transfer_config is not None),
    ("weight transfer", lambda c: getattr(c, "weight_transfer_config", None) is not None),
    ("sleep mode (--enable-sleep-mode)", lambda c: _sleeps(c)),
    ("weight offloading (--cpu-offload-gb, --offload-*)", lambda c: _offloads(c)),
    ("--calculate-kv-scales", lambda c: bool(getattr(c.cache_config, "calculate_kv_scales", False))),
    (
        "--kv-sharing-fast-prefill",
        lambda c: bool(getattr(c.cache_config, "kv_sharing_fast_prefill", False)),
    ),
    ("a model with recurrent state (hybrid)", lambda c: bool(getattr(c.model_config, "is_hybrid", False))),
    ("a pooling model", lambda c: c.model_config.runner_type == "pooling"),
    ("the V2 model runner (set VLLM_USE_V2_MODEL_RUNNER=0)", lambda c: bool(c.use_v2_model_runner)),
    ("speculative decoding with a draft model", lambda c: _drafts(c)),
    (
        "routed-experts capture",
        lambda c: bool(getattr(c.model_config, "enable_return_routed_experts", False)),
    ),
)


def _sleeps(config: Any) -> bool:
    model = config.model_config
    return bool(getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False))


def _offloads(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    uva = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0)
    groups = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    older = getattr(config.cache_config, "cpu_offload_gb", 0)
    return bool(uva or groups or older)


def _drafts(config: Any) -> bool:
    speculative = config.speculative_config
    return speculative is not None and speculative.method != "ngram"


def check_engine(vllm_config: Any) -> None:
    """Raise a typed error unless this engine configuration can be served through tiers.

    Does nothing for engines that ask neither for tiers nor for our load format.
    """
    asked = tiers_requested(vllm_config)
    ours = vllm_config.load_config.load_format == LOAD_FORMAT
    if not asked and not ours:
        return
    compat.check_version()
    if asked and not ours:
        raise SetupError(
            f"the engine is configured for tiers but has --load-format {vllm_config.load_config.load_format}: the "
            f"experts would stay empty; add --load-format {LOAD_FORMAT} or start with `ziggurat serve`"
        )
    check_compute(vllm_config, read_settings(vllm_config).config)
    for what, present in _REFUSED:
        if present(vllm_config):
            raise UnsupportedFeatureError(f"{what} is not supported together with tiered experts; remove it")
    if not Path(vllm_config.model_config.model).is_dir():
        raise SetupError(
            f"model {vllm_config.model_config.model!r} is not a local folder: packs are keyed by content, so "
            "download the model first and give its folder"
        )
