"""Compares the captured logits of two servers that were sent the same requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

_NAME = re.compile(r"ziggurat-demo-([a-z0-9]+)-try")

Composition = list[tuple[tuple[str, int], ...]]


class Step(Protocol):
    """One captured step: engine names of its requests, their scheduled tokens, logits float32 [requests, V]."""

    @property
    def requests(self) -> tuple[str, ...]: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def logits(self) -> npt.NDArray[np.float32]: ...


def request_id(tag: str, attempt: int) -> str:
    """The X-Request-Id of a request; engines add their own text before and behind it."""
    return f"ziggurat-demo-{tag}-try{attempt}"


def tag_of(engine_name: str) -> str:
    """The tag in an engine's name of a request; ValueError if the request is none of ours."""
    found = _NAME.search(engine_name)
    if found is None:
        raise ValueError(f"request {engine_name!r} was not sent by the demo")
    return found[1]


def composition(steps: Iterable[Step]) -> Composition:
    """Which requests each step computed, and how many tokens of each, in batch order."""
    return [
        tuple((tag_of(name), count) for name, count in zip(step.requests, step.tokens, strict=True))
        for step in steps
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """same_batches: every step was made up alike. rows: logit rows compared. different: rows with another bit."""

    same_batches: bool
    rows: int
    different: int

    @property
    def identical(self) -> bool:
        return self.rows > 0 and self.different == 0


def compare(expected: Sequence[Step], found: Sequence[Step]) -> Comparison:
    """Compare logits bit for bit, row by row as keyed by (request, tokens computed up to the row).

    Where the batches were made up differently the rows of a prompt's inner chunks can fall on other positions; a row
    that only one side has counts as different.
    """
    one, other = _rows(expected), _rows(found)
    different = sum(
        key not in one or key not in other or not np.array_equal(one[key], other[key])
        for key in one.keys() | other.keys()
    )
    return Comparison(composition(expected) == composition(found), len(one.keys() | other.keys()), different)


def _rows(steps: Iterable[Step]) -> dict[tuple[str, int], npt.NDArray[np.uint32]]:
    """(tag, tokens computed so far) -> raw bits of the logits behind them."""
    computed: dict[str, int] = {}
    rows = {}
    for step in steps:
        for row, (name, count) in enumerate(zip(step.requests, step.tokens, strict=True)):
            tag = tag_of(name)
            computed[tag] = computed.get(tag, 0) + count
            rows[tag, computed[tag]] = step.logits[row].view(np.uint32)
    return rows
