"""A small model, a machine with room and configurations, for tests of the budget."""

from __future__ import annotations

from typing import Any

from ziggurat.residency.budget import MachineLimits, ModelFacts
from ziggurat.residency.budget_plan import Check, Plan
from ziggurat.residency.config import TiersConfig

FACTS = ModelFacts(layers=6, experts=32, top_k=4, hidden=256, intermediate=128)  # 192 rows
ROW = 5000
STRIDE = 8192
ROOMY = MachineLimits(memory_available=64 << 30, cgroup_headroom=None, memlock=None, disk_free=1 << 40)


def config(
    *,
    device: Any = "25%",
    host: Any = "10%",
    host_extra: dict[str, Any] | None = None,
    staging: Any = "auto",
    direct_layers: Any = (),
    miss: dict[str, Any] | None = None,
    **disk: Any,
) -> TiersConfig:
    return TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": "packs", **disk},
                "host": {"size": host, **(host_extra or {})},
                "device": {"size": device, "staging": staging, "direct_layers": direct_layers},
            },
            "miss": miss or {},
        }
    )


def machine(**changes: Any) -> MachineLimits:
    values: dict[str, Any] = {"memory_available": 64 << 30, "disk_free": 1 << 40, **changes}
    return MachineLimits(**values)


def check_of(result: Plan, name: str) -> Check:
    (found,) = [one for one in result.checks if one.name == name]
    return found
