"""Entry point `vllm.general_plugins`: runs in every vLLM process, an untiered engine notices nothing."""

from __future__ import annotations

from typing import Any

from ziggurat.integration.vllm import compat
from ziggurat.integration.vllm.errors import IntegrationError, UnsupportedVllmError
from ziggurat.integration.vllm.patching import patch_once
from ziggurat.integration.vllm.settings import LOAD_FORMAT

_registered = False


def register() -> None:
    """Install the hooks; idempotent. A vLLM we cannot hook stays untouched; engines that want tiers are refused."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        compat.check_version()
        compat.check_hooks(compat.HOOKS)
    except UnsupportedVllmError as problem:
        _register_refusal(problem)
        return
    from ziggurat.integration.vllm.experts import install_experts
    from ziggurat.integration.vllm.failures import patch_scheduler
    from ziggurat.integration.vllm.ops import register_ops

    register_ops()
    install_experts()
    _register_loader()
    patch_scheduler()
    _patch_engine_args()


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from ziggurat.integration.vllm.loader import ZigguratLoader

    register_model_loader(LOAD_FORMAT)(ZigguratLoader)


def _register_refusal(problem: UnsupportedVllmError) -> None:
    """Make our load format say what is wrong, on a vLLM of which we only know this much."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RefusingLoader(BaseModelLoader):
        def __init__(self, load_config: Any) -> None:
            raise problem

        def download_model(self, model_config: Any) -> None:
            raise problem

        def load_weights(self, model: Any, model_config: Any) -> None:
            raise problem

    register_model_loader(LOAD_FORMAT)(RefusingLoader)


def _patch_engine_args() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def wrap(original: Any) -> Any:
        def create_engine_config(self: Any, usage_context: Any = None, *args: Any, **kwargs: Any) -> Any:
            config = original(self, usage_context, *args, **kwargs)
            _check(config, usage_context)
            return config

        return create_engine_config

    patch_once(EngineArgs, "create_engine_config", wrap)


def _check(config: Any, usage_context: Any) -> None:
    from vllm.usage.usage_lib import UsageContext

    from ziggurat.integration.preflight import REFUSALS, preflight
    from ziggurat.integration.vllm.compute import largest_batch
    from ziggurat.integration.vllm.failures import patch_api_process
    from ziggurat.integration.vllm.guard import check_engine
    from ziggurat.integration.vllm.settings import read_settings, tiers_requested

    refusals: tuple[type[Exception], ...] = (IntegrationError, *REFUSALS)
    serving = usage_context == UsageContext.OPENAI_API_SERVER
    try:
        check_engine(config)
        if not tiers_requested(config):
            return
        settings = read_settings(config)
        preflight(
            config.model_config.model,
            settings.config,
            config.parallel_config.tensor_parallel_size,
            max_tokens=largest_batch(config),
        )
    except refusals as refusal:
        if serving:
            # One line and a status, where vLLM would print a traceback of its own start-up.
            raise SystemExit(f"ziggurat: {refusal}") from refusal
        raise
    if serving:
        patch_api_process()
