"""Eviction policies by the name that a configuration uses."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from ziggurat.residency.policies.arc import ArcPolicy
from ziggurat.residency.policies.base import EvictionPolicy, PolicySettings
from ziggurat.residency.policies.clock import ClockPolicy
from ziggurat.residency.policies.heat_weighted import HeatWeightedPolicy
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


def arena_policy(name: str) -> str:
    """The policy of the host arena beside a pool under policy `name`.

    What reaches the arena is what the pool lacked, not what layers are routed to, so that policies which look at
    routing have nothing to go by there.
    """
    return LfuDecayPolicy.name if name in (HeatWeightedPolicy.name, NextUsePolicy.name) else name
