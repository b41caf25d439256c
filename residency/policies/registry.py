"""Eviction policies by the name that a configuration uses."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final

from ziggurat.residency.policies.arc import ArcPolicy
from ziggurat.residency.policies.base import EvictionPolicy, PolicySettings
from ziggurat.residency.policies.clock import ClockPolicy
from ziggurat.residency.policies.heat_weighted import HeatWeightedPolicy
from ziggurat.residency.policies.layer_floor import LayerFloorPolicy
from ziggurat.residency.policies.lfru import LfruPolicy
from ziggurat.residency.policies.lfu_decay import LfuDecayPolicy
from ziggurat.residency.policies.lru import LruPolicy
from ziggurat.residency.policies.next_use import NextUsePolicy
from ziggurat.residency.policies.s3_fifo import S3FifoPolicy
from ziggurat.residency.policies.sieve import SievePolicy
from ziggurat.residency.policies.slru import SlruPolicy
from ziggurat.residency.policies.w_tinylfu import WTinyLfuPolicy
from ziggurat.residency.runtime_errors import UnknownPolicyError

_FACTORIES: dict[str, Callable[[PolicySettings], EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        ArcPolicy,
        ClockPolicy,
        HeatWeightedPolicy,
        LfruPolicy,
        LfuDecayPolicy,
        LruPolicy,
        NextUsePolicy,
        S3FifoPolicy,
        SievePolicy,
        SlruPolicy,
        WTinyLfuPolicy,
    )
}


HOST_POLICY: Final = HeatWeightedPolicy.name
"""What an arena has if nobody chooses: best or nearly so on every trace that was measured (docs/policies.md)."""


def policy_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_FACTORIES))


def make_policy(name: str, settings: PolicySettings | None = None) -> EvictionPolicy:
    """A fresh policy; UnknownPolicyError names the nearest registered one."""
    factory = _FACTORIES.get(name)
    if factory is None:
        nearest = difflib.get_close_matches(name, policy_names(), n=1, cutoff=0.0)
        raise UnknownPolicyError(f"eviction policy {name!r} does not exist; did you mean {nearest[0]!r}?")
    return factory(settings or PolicySettings())


def host_policy_names() -> tuple[str, ...]:
    """Names of the policies that an arena can have.

    What reaches it is what the pool lacked, not what layers are routed to, so that a policy that learns from routing
    has nothing to go by there.
    """
    return tuple(name for name in policy_names() if name != NextUsePolicy.name)


def host_half_life(experts: int, top_k: int) -> float:
    """Steps after which a use of a row counts half in an arena: as many as there are between two uses of an expert if
    routing is even. The pool has what is used more often; half and twice as much is measured in docs/policies.md."""
    return experts / top_k


def make_host_policy(name: str, settings: PolicySettings, *, floor: float | None = None) -> EvictionPolicy:
    """A fresh policy for an arena, one of `host_policy_names`. floor: of each layer, see `LayerFloorPolicy`; None does
    not tell layers apart. UnknownPolicyError names the nearest."""
    if name == NextUsePolicy.name:
        raise UnknownPolicyError(
            f"an arena cannot have the policy {name!r}, which learns from routing; there are "
            f"{', '.join(host_policy_names())}"
        )
    if floor is None:
        return make_policy(name, settings)
    return LayerFloorPolicy(lambda one: make_policy(name, one), settings, floor)
