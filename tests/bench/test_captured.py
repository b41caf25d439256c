"""Comparison of captured logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from bench.captured import compare, composition, request_id, tag_of


@dataclass(frozen=True)
class FakeStep:
    requests: tuple[str, ...]
    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32]


def step(*parts: tuple[str, int], attempt: int = 0, value: float = 1.0) -> FakeStep:
    """A step whose logits depend on nothing but tag and value."""
    names = tuple(f"cmpl-{request_id(tag, attempt)}-0-1a2b3c4d" for tag, _ in parts)
    logits = np.array([[value, ord(tag[0]), -0.0] for tag, _ in parts], dtype=np.float32)
    return FakeStep(names, tuple(count for _, count in parts), logits)


RUN = [step(("a", 5), ("b", 7)), step(("a", 1), ("b", 1), value=2.0)]


def test_names_of_engines_lead_back_to_tags() -> None:
    assert tag_of("cmpl-ziggurat-demo-long-try3-0-deadbeef") == "long"
    with pytest.raises(ValueError, match="not sent by the demo"):
        tag_of("cmpl-something-else-0")
    assert composition(RUN) == [(("a", 5), ("b", 7)), (("a", 1), ("b", 1))]


def test_the_same_bits_are_identical_in_any_attempt() -> None:
    again = [step(("a", 5), ("b", 7), attempt=2), step(("a", 1), ("b", 1), attempt=2, value=2.0)]
    found = compare(RUN, again)
    assert found.identical
    assert found.same_batches
    assert found.rows == 4


def test_one_bit_is_enough_to_differ() -> None:
    spoilt = RUN[1].logits.copy()
    spoilt[1, 2] = 0.0  # minus zero became zero
    found = compare(RUN, [RUN[0], replace(RUN[1], logits=spoilt)])
    assert (found.identical, found.different, found.same_batches) == (False, 1, True)


def test_nan_is_compared_by_its_bits() -> None:
    nan = [replace(s, logits=np.full_like(s.logits, np.nan)) for s in RUN]
    assert compare(nan, nan).identical
    assert not compare(RUN, nan).identical


def test_other_batches_are_noticed_but_rows_compare_by_request_and_position() -> None:
    apart = [step(("a", 5)), step(("b", 7)), step(("b", 1), ("a", 1), value=2.0)]
    found = compare(RUN, apart)
    assert not found.same_batches
    assert found.identical


def test_rows_that_one_side_lacks_differ() -> None:
    assert not compare(RUN, RUN[:1]).identical
    assert not compare(RUN[:1], RUN).identical
    assert not compare([], []).identical
