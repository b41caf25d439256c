"""One contract for every eviction policy, plus golden counts that pin each one's decisions."""

from __future__ import annotations

from collections.abc import Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.residency.policies.base import EvictionPolicy, PolicySettings
from ziggurat.residency.policies.registry import (
    host_policy_names,
    make_host_policy,
    make_policy,
    policy_names,
)
from ziggurat.residency.runtime_errors import PolicyError, UnknownPolicyError

KEYS = 12
HALF_LIFE = 3.0

operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, KEYS - 1), st.sampled_from([0.0, 1.0, 2.0])),
        st.tuples(st.just("remove"), st.integers(0, KEYS - 1), st.just(0.0)),
        st.tuples(st.just("evict"), st.integers(0, 2**KEYS - 1), st.just(0.0)),
        st.tuples(st.just("advance"), st.integers(1, 900), st.just(0.0)),
    ),
    max_size=60,
)


class NaiveLru:
    """Scans timestamps; shares no code with the policy."""

    def __init__(self) -> None:
        self.stamp: dict[int, int] = {}
        self.clock = 0
        self.floor = 0

    def use(self, key: int, weight: float) -> None:
        self.clock += 1
        if weight > 0:
            self.stamp[key] = self.clock
        elif key not in self.stamp:
            self.floor -= 1
            self.stamp[key] = self.floor

    def remove(self, key: int) -> None:
        del self.stamp[key]

    def advance(self, steps: int) -> None:
        pass

    def victim(self, blocked: Container[int]) -> int | None:
        free = [key for key in self.stamp if key not in blocked]
        return min(free, key=lambda key: self.stamp[key]) if free else None


class NaiveLfu:
    """Recomputes every decayed count from the full history of uses."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.history: dict[int, list[tuple[int, float]]] = {}
        self.now = 0

    def use(self, key: int, weight: float) -> None:
        self.held.add(key)
        self.history.setdefault(key, []).append((self.now, weight))

    def remove(self, key: int) -> None:
        self.held.remove(key)

    def advance(self, steps: int) -> None:
        self.now += steps

    def score(self, key: int) -> float:
        # in units of step 0 would overflow; relative to the newest use anywhere it cannot
        newest = max((t for uses in self.history.values() for t, w in uses if w > 0), default=0)
        return sum(w * float(2.0 ** ((t - newest) / HALF_LIFE)) for t, w in self.history[key])

    def victim(self, blocked: Container[int]) -> int | None:
        free = [key for key in self.held if key not in blocked]
        return min(free, key=lambda key: (self.score(key), -key)) if free else None


NAIVE: dict[str, type[NaiveLru] | type[NaiveLfu]] = {"lru": NaiveLru, "lfu-decay": NaiveLfu}


def use(policy: EvictionPolicy, held: set[int], key: int, weight: float) -> None:
    if key in held:
        policy.touch(key, weight)
    else:
        policy.insert(key, weight)
        held.add(key)


BY_LAYER = [f"{name} by layer" for name in host_policy_names()]


def made(name: str) -> EvictionPolicy:
    """A policy by its name in the lists of these tests; those by layer have four layers and a floor."""
    plain = name.removesuffix(" by layer")
    if plain == name:
        return make_policy(name, PolicySettings(half_life=HALF_LIFE))
    return make_host_policy(plain, PolicySettings(HALF_LIFE, 4, KEYS // 4), floor=0.5)


@pytest.mark.parametrize("name", [*policy_names(), *BY_LAYER])
@settings(max_examples=80, deadline=None)
@given(ops=operations)
def test_contract(name: str, ops: list[tuple[str, int, float]]) -> None:
    first, second = made(name), made(name)
    held: set[int] = set()
    for op, number, weight in ops:
        if op == "use":
            mirror = set(held)
            use(first, held, number, weight)
            use(second, mirror, number, weight)
        elif op == "remove":
            if number in held:
                held.remove(number)
                first.remove(number)
                second.remove(number)
        elif op == "advance":
            first.advance(number)
            second.advance(number)
        else:
            blocked = {key for key in range(KEYS) if number >> key & 1}
            victim = first.victim(blocked)
            assert victim == second.victim(blocked)
            assert victim == first.victim(blocked), "looking for a victim must not change the answer"
            assert (victim is None) == (held <= blocked)
            if victim is not None:
                assert victim in held
                assert victim not in blocked
                first.remove(victim)
                second.remove(victim)
                held.remove(victim)
        assert len(first) == len(held)
        assert set(first.order()) == held
        assert len(first.order()) == len(held)
        if held:
            # Both are asked: a look may settle books, which is no difference between two that did the same.
            assert first.order()[-1] == first.victim(()) == second.victim(())


@pytest.mark.parametrize("name", sorted(NAIVE))
@settings(max_examples=60, deadline=None)
@given(ops=operations)
def test_same_victims_as_a_naive_implementation(name: str, ops: list[tuple[str, int, float]]) -> None:
    policy = make_policy(name, PolicySettings(half_life=HALF_LIFE))
    naive = NAIVE[name]()
    held: set[int] = set()
    for op, number, weight in ops:
        if op == "use":
            use(policy, held, number, weight)
            naive.use(number, weight)
        elif op == "remove" and number in held:
            held.remove(number)
            policy.remove(number)
            naive.remove(number)
        elif op == "advance":
            # powers of two only: both sides then compute the same floats exactly
            steps = int(HALF_LIFE) * (number % 7 + 1)
            policy.advance(steps)
            naive.advance(steps)
        elif op == "evict":
            blocked = {key for key in range(KEYS) if number >> key & 1}
            assert policy.victim(blocked) == naive.victim(blocked)


@pytest.mark.parametrize("name", [*policy_names(), *BY_LAYER])
def test_misuse_is_an_error_that_names_the_key(name: str) -> None:
    policy = made(name)
    policy.insert(7)
    with pytest.raises(PolicyError, match="7"):
        policy.insert(7)
    with pytest.raises(PolicyError, match="8"):
        policy.touch(8)
    with pytest.raises(PolicyError, match="8"):
        policy.remove(8)


@pytest.mark.parametrize("name", policy_names())
def test_scan_keys_leave_before_keys_that_were_used(name: str) -> None:
    policy = make_policy(name)
    for key in (5, 6):
        policy.insert(key)
    for key in (1, 9):
        policy.insert(key, 0.0)
        policy.touch(key, 0.0)
    assert {policy.order()[-1], policy.order()[-2]} == {1, 9}
    policy.touch(9, 1.0)
    assert policy.victim(()) == 1


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(UnknownPolicyError, match="lfu-decay"):
        make_policy("lfu_decay")


def test_half_life_must_be_positive() -> None:
    with pytest.raises(PolicyError, match="half_life is 0"):
        make_policy("lfu-decay", PolicySettings(half_life=0))


def test_frequency_outlives_a_burst_of_strangers_but_not_for_ever() -> None:
    policy = make_policy("lfu-decay", PolicySettings(half_life=10))
    policy.insert(1, 8.0)
    policy.insert(2, 1.0)
    policy.advance(10)  # 1 is worth 4 now
    policy.insert(3, 3.0)
    assert policy.order() == [1, 3, 2]
    policy.advance(1000)  # all counts decay alike: the order stands …
    assert policy.order() == [1, 3, 2]
    policy.touch(2, 1.0)  # … and anything new outweighs what is long past
    assert policy.order() == [2, 1, 3]


def test_scores_survive_more_half_lives_than_float64_has_exponents() -> None:
    policy = make_policy("lfu-decay", PolicySettings(half_life=1))
    policy.insert(1, 5.0)
    policy.insert(2, 4.0)
    policy.advance(100_000)
    policy.insert(3, 1.0)
    assert policy.victim(()) == 2  # both old counts are 0 by now; ties go by key
    assert policy.order()[0] == 3


def test_counts_stay_comparable_when_the_base_step_moves() -> None:
    policy = make_policy("lfu-decay", PolicySettings(half_life=1))
    policy.insert(1, 2.0**100)
    policy.advance(300)  # worth 2**-200 now, and the base has moved once
    policy.insert(2, 2.0**-190)
    policy.insert(3, 2.0**-210)
    assert policy.order() == [2, 1, 3]


def test_an_evicted_key_resumes_its_history() -> None:
    policy = make_policy("lfu-decay")
    policy.insert(1, 10.0)
    policy.insert(2, 5.0)
    policy.remove(1)
    policy.insert(1, 0.0)
    assert policy.order() == [1, 2]


def synthetic_trace() -> list[int]:
    """4096 accesses over 64 keys, skewed to low keys; the hot set moves half-way. Integers only."""
    state = 12345
    out = []
    for i in range(4096):
        state = (state * 1103515245 + 12345) % 2**31
        a = state >> 8 & 63
        state = (state * 1103515245 + 12345) % 2**31
        b = state >> 8 & 63
        hot = min(a, b) * min(a, b) // 63
        out.append((hot + (32 if i >= 2048 else 0)) % 64)
    return out


def hits(name: str, capacity: int) -> int:
    policy = make_policy(name, PolicySettings(half_life=64))
    held: set[int] = set()
    count = 0
    for i, key in enumerate(synthetic_trace()):
        if key in held:
            count += 1
            policy.touch(key)
        else:
            if len(held) == capacity:
                victim = policy.victim(())
                assert victim is not None
                policy.remove(victim)
                held.remove(victim)
            policy.insert(key)
            held.add(key)
        if i % 8 == 7:
            policy.advance()
    return count


GOLDEN: dict[tuple[str, int], int] = {
    ("arc", 4): 1378,
    ("arc", 8): 1940,
    ("arc", 16): 2656,
    ("arc", 32): 3595,
    ("clock", 4): 1130,
    ("clock", 8): 1836,
    ("clock", 16): 2649,
    ("clock", 32): 3614,
    ("heat-weighted", 4): 1502,
    ("heat-weighted", 8): 2132,
    ("heat-weighted", 16): 2771,
    ("heat-weighted", 32): 3568,
    ("lfru", 4): 1409,
    ("lfru", 8): 2065,
    ("lfru", 16): 2645,
    ("lfru", 32): 3353,
    ("lfu-decay", 4): 1502,
    ("lfu-decay", 8): 2141,
    ("lfu-decay", 16): 2769,
    ("lfu-decay", 32): 3571,
    ("lru", 4): 1085,
    ("lru", 8): 1781,
    ("lru", 16): 2605,
    ("lru", 32): 3598,
    ("next-use", 4): 1085,
    ("next-use", 8): 1781,
    ("next-use", 16): 2605,
    ("next-use", 32): 3598,
    ("s3-fifo", 4): 1577,
    ("s3-fifo", 8): 2127,
    ("s3-fifo", 16): 2824,
    ("s3-fifo", 32): 3624,
    ("sieve", 4): 1383,
    ("sieve", 8): 2059,
    ("sieve", 16): 2795,
    ("sieve", 32): 3629,
    ("slru", 4): 1467,
    ("slru", 8): 2078,
    ("slru", 16): 2785,
    ("slru", 32): 3615,
    ("w-tinylfu", 4): 1584,
    ("w-tinylfu", 8): 2165,
    ("w-tinylfu", 16): 2851,
    ("w-tinylfu", 32): 3625,
}


@pytest.mark.parametrize(("name", "capacity"), sorted(GOLDEN))
def test_golden_hit_counts(name: str, capacity: int) -> None:
    assert hits(name, capacity) == GOLDEN[(name, capacity)]


def test_every_policy_has_golden_counts() -> None:
    assert {name for name, _ in GOLDEN} == set(policy_names())
