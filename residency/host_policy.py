"""The policy of the arena, as the configuration says."""

from __future__ import annotations

from ziggurat.residency.config import PolicyConfig
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.policies.base import EvictionPolicy
from ziggurat.residency.policies.registry import host_settings, make_host_policy


def host_policy(config: PolicyConfig, geometry: ServiceGeometry) -> EvictionPolicy:
    """Of an arena below a pool of these layers."""
    percent = config.host_floor
    return make_host_policy(
        config.host,
        host_settings(geometry.layers, geometry.experts, geometry.top_k),
        floor=None if percent is None else percent / 100,
    )
