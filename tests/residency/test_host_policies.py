"""Policies of an arena: which there are, layers that keep their floor, and what a miss costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.policies.base import NO_IDS, EvictionPolicy, PolicySettings
from ziggurat.residency.policies.registry import (
    HOST_POLICY,
    host_half_life,
    host_policy_names,
    make_host_policy,
    policy_names,
)
from ziggurat.residency.runtime_errors import PolicyError, UnknownPolicyError


def test_an_arena_can_have_every_policy_but_the_one_that_learns_from_routing() -> None:
    assert set(policy_names()) - set(host_policy_names()) == {"next-use"}
    with pytest.raises(UnknownPolicyError, match="learns from routing; there are arc"):
        make_host_policy("next-use", PolicySettings())
    with pytest.raises(UnknownPolicyError, match="heat-weighted"):
        make_host_policy("heat-wieghted", PolicySettings())


def test_the_configuration_accepts_exactly_these_and_has_the_measured_default() -> None:
    def policy(**values: object) -> TiersConfig:
        return TiersConfig.from_mapping({"tiers": {"disk": {"path": Path("packs")}}, "policy": values})

    assert policy().policy.host == HOST_POLICY
    assert policy().policy.host_floor is None
    for name in host_policy_names():
        assert policy(host=name).policy.host == name
    for bad in ({"host": "next-use"}, {"host_floor": 101}, {"host_floor": -1}):
        with pytest.raises(ConfigError, match=r"policy\.host"):
            policy(**bad)


def test_half_life_is_the_time_between_two_uses_of_an_expert() -> None:
    assert host_half_life(256, 8) == 32.0


# -- floors --------------------------------------------------------------------------------------------------------

LAYERS, EXPERTS = 4, 100


def floors(floor: float, name: str = "lru") -> EvictionPolicy:
    return make_host_policy(name, PolicySettings(None, LAYERS, EXPERTS), floor=floor)


def held(policy: EvictionPolicy) -> list[int]:
    counts = [0] * LAYERS
    for key in policy.order():
        counts[key // EXPERTS] += 1
    return counts


def fill(policy: EvictionPolicy, places: int, requests: list[int]) -> int:
    """Ask for keys in order; how many were absent."""
    here: set[int] = set()
    missed = 0
    for key in requests:
        if key in here:
            policy.touch(key)
            continue
        missed += 1
        if len(here) == places:
            victim = policy.victim(())
            assert victim is not None
            policy.remove(victim)
            here.remove(victim)
        policy.insert(key)
        here.add(key)
        policy.advance()
    return missed


def greedy(rounds: int) -> list[int]:
    """Layer 0 asks for ever new rows; the others for five rows each, once in a while."""
    found: list[int] = []
    for turn in range(rounds):
        found += [turn % EXPERTS]
        if turn % 10 == 0:
            found += [layer * EXPERTS + turn // 10 % 5 for layer in (1, 2, 3)]
    return found


@pytest.mark.parametrize(("floor", "least"), [(0.5, 5), (1.0, 9)])
def test_a_layer_keeps_its_floor_however_much_another_asks_for(floor: float, least: int) -> None:
    policy = floors(floor)
    fill(policy, 40, [layer * EXPERTS + i for i in range(10) for layer in range(LAYERS)])
    assert held(policy) == [10] * LAYERS
    for key in range(2 * EXPERTS + 20, 2 * EXPERTS + 90):
        victim = policy.victim(())
        assert victim is not None
        policy.remove(victim)
        policy.insert(key)
    assert min(held(policy)) == least
    assert sum(held(policy)) == 40


def test_without_a_floor_layers_have_room_in_proportion_to_what_they_ask_for() -> None:
    policy = floors(0.0)
    fill(policy, 40, [layer * EXPERTS + i for i in range(10) for layer in range(LAYERS)])
    for key in range(20, 90):
        victim = policy.victim(())
        assert victim is not None
        policy.remove(victim)
        policy.insert(key)
        policy.touch(key)
    assert held(policy) == [34, 2, 2, 2], "150 uses and 10 each"


def test_a_floor_spares_quiet_layers_misses() -> None:
    shared = make_host_policy("lru", PolicySettings(None, LAYERS, EXPERTS))
    requests = greedy(400)
    assert fill(floors(0.5), 40, requests) < fill(shared, 40, requests)


def test_a_layer_whose_rows_are_all_in_use_is_passed_over() -> None:
    policy = floors(0.0)
    for key in (0, 1, EXPERTS):
        policy.insert(key)
    policy.touch(EXPERTS)
    assert policy.victim(()) == 0
    assert policy.victim({0, 1}) == EXPERTS
    assert policy.victim({0, 1, EXPERTS}) is None


@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_a_floor_that_cannot_be_is_refused(floor: float) -> None:
    with pytest.raises(PolicyError, match="0 to 1"):
        floors(floor)
    with pytest.raises(PolicyError, match="without the number of their experts"):
        make_host_policy("lru", PolicySettings(), floor=0.5)


def test_a_long_time_changes_no_decision() -> None:
    """Demand is rescaled before its weights leave the range of numbers."""
    near, far = floors(0.2), floors(0.2)
    for policy in (near, far):
        fill(policy, 12, [layer * EXPERTS + i for i in range(3) for layer in range(LAYERS)])
        policy.touch(EXPERTS)
    far.advance(256 * 256)
    assert near.order() == far.order()


# -- what a miss costs ---------------------------------------------------------------------------------------------


class Counted(int):
    """A key that counts how often a table looks it up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return int.__hash__(self)

    def __neg__(self) -> Counted:
        return Counted(int.__neg__(self))


class SortsAll:
    """What no policy may do: look at every key to find the coldest."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}
        self.clock = 0

    def insert(self, key: int, weight: float = 1.0) -> None:
        self.touch(key, weight)

    def touch(self, key: int, weight: float = 1.0) -> None:
        self.clock += 1
        self.uses[key] = self.clock

    def remove(self, key: int) -> None:
        del self.uses[key]

    def victim(self, blocked: object) -> int:
        return sorted(self.uses, key=lambda key: self.uses[key])[0]

    def routed(self, layer: int, ids: object) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass


def lookups_per_miss(make: Callable[[], Any], places: int) -> float:
    """Of a full arena that is asked for popular rows, for ever new ones, and now and then for a scan."""
    policy = make()
    chance = random.Random(places)
    here: set[int] = set()  # of plain numbers, whose look-ups are not counted
    misses, first = 0, 0
    for turn in range(3 * places):
        if turn == places:
            misses, first = 0, Counted.looked_up
        popular = int(chance.paretovariate(0.6)) % places
        for number in (popular, places + chance.randrange(8 * places)):
            key, scan = Counted(number), turn % 16 == 0
            policy.routed(number % 8, NO_IDS)
            if number in here:
                policy.touch(key, 0.0 if scan else 1.0)
                continue
            misses += 1
            if len(here) == places:
                victim = policy.victim(())
                policy.remove(victim)
                here.remove(int(victim))
            policy.insert(key, 0.0 if scan else 1.0)
            here.add(number)
        policy.advance()
    return (Counted.looked_up - first) / misses


@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("name", host_policy_names())
def test_a_miss_costs_no_more_in_an_arena_sixteen_times_as_large(name: str, floor: float | None) -> None:
    def make(places: int) -> Callable[[], EvictionPolicy]:
        known = PolicySettings(host_half_life(64, 8), 8, 9 * places // 8)
        return lambda: make_host_policy(name, known, floor=floor)

    small, large = (lookups_per_miss(make(places), places) for places in (256, 4096))
    # A logarithm would grow by half.
    assert large < 1.5 * small + 2, (
        f"{small:.1f} look-ups a miss in the small one, {large:.1f} in the large one"
    )


def test_that_would_be_noticed() -> None:
    small, large = (lookups_per_miss(SortsAll, places) for places in (64, 256))
    assert large > 3 * small
