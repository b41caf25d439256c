"""Eviction policies by the name that a configuration uses."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from ziggurat.residency.policies.base import EvictionPolicy, PolicySettings
from ziggurat.residency.policies.lfu_decay import LfuDecayPolicy
from ziggurat.residency.policies.lru import LruPolicy
from ziggurat.residency.runtime_errors import UnknownPolicyError

_FACTORIES: dict[str, Callable[[PolicySettings], EvictionPolicy]] = {
    LfuDecayPolicy.name: LfuDecayPolicy,
    LruPolicy.name: LruPolicy,
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
