"""The policy of the arena, as the configuration says."""

from __future__ import annotations

from ziggurat.residency.config import PolicyConfig
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.policies.base import EvictionPolicy, PolicySettings
from ziggurat.residency.policies.registry import host_half_life, make_host_policy


def host_policy(config: PolicyConfig, geometry: ServiceGeometry) -> EvictionPolicy:
    """Of an arena below a pool of these layers."""
    half_life = host_half_life(geometry.experts, geometry.top_k)
    percent = config.host_floor
    return make_host_policy(
        config.host,
        PolicySettings(half_life, geometry.layers, geometry.experts),
        floor=None if percent is None else percent / 100,
    )
