"""What sets each policy apart, in sequences short enough to follow by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ziggurat.residency.policies import next_use
from ziggurat.residency.policies.base import EvictionPolicy, PolicySettings
from ziggurat.residency.policies.next_use import NextUsePolicy
from ziggurat.residency.policies.next_use_compiled import compiled
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.runtime_errors import PolicyError


def fill(policy: EvictionPolicy, keys: str) -> None:
    """Use keys a, b, … in order; one that is not held is inserted."""
    held = set(policy.order())
    for letter in keys:
        key = ord(letter) - ord("a")
        if key in held:
            policy.touch(key)
        else:
            policy.insert(key)
            held.add(key)


def leave(policy: EvictionPolicy, count: int) -> str:
    """The next `count` victims, evicted."""
    gone = ""
    for _ in range(count):
        key = policy.victim(())
        assert key is not None
        policy.remove(key)
        gone += chr(ord("a") + key)
    return gone


def letters(policy: EvictionPolicy) -> str:
    """In the order in which they would leave."""
    return "".join(chr(ord("a") + key) for key in reversed(policy.order()))


def test_clock_gives_a_second_chance_and_takes_the_mark_away() -> None:
    clock = make_policy("clock")
    fill(clock, "abcd" + "ab")
    assert leave(clock, 1) == "c"
    fill(clock, "e")
    assert leave(clock, 3) == "dab", "a and b were passed once and have no mark left"


def test_sieve_sifts_old_keys_and_leaves_survivors_where_they_are() -> None:
    sieve = make_policy("sieve")
    fill(sieve, "abcd" + "ab")
    assert leave(sieve, 1) == "c"
    fill(sieve, "e")
    assert leave(sieve, 1) == "d", "the hand goes on towards new keys"
    fill(sieve, "f")
    assert leave(sieve, 2) == "ef"
    assert leave(sieve, 2) == "ab", "and begins anew at the oldest"


def test_slru_protects_what_was_used_twice() -> None:
    slru = make_policy("slru")
    fill(slru, "abcde" + "ab")
    assert leave(slru, 3) == "cde"
    fill(slru, "fgh" + "fgh")  # three more than the protected part (80 % of 5) has room for: a goes back
    assert letters(slru)[0] == "a"


def test_lfru_keeps_recent_keys_and_evicts_the_least_frequent_of_the_others() -> None:
    lfru = make_policy("lfru")
    fill(lfru, "abcd" + "aaabbcc")  # two are privileged: b and c; a fell back with three uses more than d
    assert letters(lfru) == "dabc"


def test_arc_moves_its_target_by_what_comes_back() -> None:
    arc = make_policy("arc")
    fill(arc, "abcd" + "cd")
    assert leave(arc, 1) == "a"
    fill(arc, "a")  # came back from the once-used list: its target grows, so the often-used list gives way
    assert leave(arc, 1) == "c"
    fill(arc, "c")  # came back from the often-used list: the target shrinks again
    assert leave(arc, 1) == "b"


def test_s3_fifo_drops_what_is_used_once_and_remembers_it() -> None:
    s3 = make_policy("s3-fifo")
    fill(s3, "abcdefghij" + "aab")
    assert leave(s3, 1) == "b", "a was used more than once and moved on, b was not"
    fill(s3, "b")
    assert letters(s3)[:8] == "cdefghij", "b came back and is in the main queue"


def test_w_tinylfu_lets_in_only_what_is_more_frequent() -> None:
    tiny = make_policy("w-tinylfu")
    fill(tiny, "abcd" + "abc")
    for stranger in "efg":
        assert leave(tiny, 1) in "defg"
        fill(tiny, stranger)
    assert set("abc") <= set(letters(tiny))
    fill(tiny, "g" * 5)
    assert leave(tiny, 1) == "a", "g is more frequent by now"


# -- policies that look at routing ---------------------------------------------------------------------------------


def told(policy: EvictionPolicy, layer: int, experts: list[int], per_layer: int = 4) -> None:
    """A layer is routed; rows that are not held come in."""
    policy.routed(layer, np.array([experts]))
    held = set(policy.order())
    for expert in sorted(experts):
        key = layer * per_layer + expert
        if key in held:
            policy.touch(key)
        else:
            policy.insert(key)


@pytest.mark.parametrize("name", ["heat-weighted", "next-use"])
def test_of_equally_hot_rows_that_of_the_layer_that_has_just_run_leaves(name: str) -> None:
    policy = make_policy(name, PolicySettings(layers=3, experts=4))
    for _ in range(8):
        for layer in range(3):
            told(policy, layer, [0, 1])
        policy.advance()
    order = [key // 4 for key in reversed(policy.order())]
    assert order == [2, 2, 1, 1, 0, 0]
    told(policy, 0, [0, 1])
    assert [key // 4 for key in reversed(policy.order())] == [0, 0, 2, 2, 1, 1]


def test_heat_outweighs_distance() -> None:
    policy = make_policy("heat-weighted", PolicySettings(layers=2, experts=4))
    for step in range(12):
        told(policy, 0, [0] if step else [0, 1])
        told(policy, 1, [0])
        policy.advance()
    assert policy.victim(()) == 1, "though its layer is the next one"


def test_heat_counts_a_use_once_a_step() -> None:
    policy = make_policy("heat-weighted", PolicySettings(layers=1, experts=4))
    told(policy, 0, [0, 1])
    policy.touch(0, 5.0)
    policy.touch(0, 5.0)
    policy.advance()
    told(policy, 0, [1])
    assert policy.victim(()) == 0


def test_next_use_learns_what_follows_what() -> None:
    """Expert 1 always follows 0, and 3 follows 2; in the long run all four are used equally often."""
    pairs = np.random.default_rng(1).integers(0, 2, size=120)
    policy = make_policy("next-use", PolicySettings(layers=1, experts=4))
    right = 0
    for pair in pairs.tolist():
        told(policy, 0, [2 * pair])
        if len(policy) == 4:
            right += policy.victim({2 * pair}) != 2 * pair + 1
        policy.advance()
        told(policy, 0, [2 * pair + 1])
        policy.advance()
    assert right > 110


def test_next_use_remembers_a_longer_past_than_one_step() -> None:
    """After 0 comes 1 or 2, whichever followed 3 or 4 before it: the step alone does not say which."""
    policy = make_policy("next-use", PolicySettings(layers=1, experts=6))
    right = wrong = 0
    for turn in range(60):
        first = turn * 7 % 5 % 2
        told(policy, 0, [3 + first], 6)
        policy.advance()
        told(policy, 0, [0], 6)
        if turn > 20:
            kept = policy.victim({0, 3, 4, 5})
            right += kept == 2 - first
            wrong += kept == 1 + first
        policy.advance()
        told(policy, 0, [1 + first], 6)
        policy.advance()
    assert right > 4 * wrong


def test_without_numba_next_use_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_use, "compiled", compiled.__wrapped__)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(PolicyError, match="pip install numba, or choose heat-weighted"):
        make_policy("next-use", PolicySettings(layers=1, experts=4))


def test_next_use_is_an_lru_until_it_hears_of_routing() -> None:
    policy = make_policy("next-use", PolicySettings(layers=1, experts=6))
    fill(policy, "abcd" + "a")
    assert letters(policy) == "bcda"
    policy.routed(0, np.array([[1]]))
    policy.touch(1)
    assert policy.order()[0] == 1


def test_next_use_does_the_same_twice_and_copies_of_it_go_their_own_way() -> None:
    def trained() -> NextUsePolicy:
        policy = NextUsePolicy(PolicySettings(layers=2, experts=8))
        random = np.random.default_rng(5)
        for _ in range(300):
            for layer in range(2):
                experts = random.choice(8, size=3, replace=False).tolist()
                told(policy, layer, experts, 8)
            policy.advance()
        return policy

    one, other = trained(), trained()
    before = one.order()
    assert before == other.order()
    told(other, 0, [before[-1] % 8], 8)
    assert one.order() == before


def test_more_tokens_than_are_followed_and_a_second_part_of_a_layer_do_no_harm() -> None:
    policy = make_policy("next-use", PolicySettings(layers=1, experts=64))
    random = np.random.default_rng(2)
    for key in range(64):
        policy.insert(key)
    for _ in range(5):
        policy.routed(0, random.integers(0, 64, size=(40, 4)))
        policy.routed(0, random.integers(0, 64, size=(3, 4)))
        policy.routed(0, np.zeros((0, 4), dtype=np.int64))
        policy.advance()
    assert sorted(policy.order()) == list(range(64))
