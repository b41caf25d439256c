"""Entry point `vllm.stat_logger_plugins`: puts our collector beside vLLM's own metrics in the API server."""

from __future__ import annotations

from typing import Any, ClassVar

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import StatLoggerBase

from ziggurat.integration.observability.collector import TierCollector
from ziggurat.integration.observability.shared import read_instance
from ziggurat.integration.vllm.settings import tiers_requested


class ZigguratStatLogger(StatLoggerBase):
    """Registers the collector of an engine's instance once; records nothing itself."""

    _registered: ClassVar[set[str]] = set()

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        instance: str = vllm_config.instance_id
        if tiers_requested(vllm_config) and instance not in self._registered:
            self._registered.add(instance)
            REGISTRY.register(TierCollector(lambda: read_instance(instance)))

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: workers write their counters themselves."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
