"""The data of a step: what a caller hands in, what it gets back, and the state scoped to a step or to one pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ziggurat.residency.runtime_errors import StepError

T = TypeVar("T")

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Outcome = Literal["clean", "inline", "streamed", "replayed", "exact", "tolerated", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("clean", "inline", "streamed", "replayed", "exact", "tolerated", "failed")


class PassPath(Enum):
    """How a forward pass may run. EAGER must not replay a captured graph, because the host serves its misses."""

    GRAPH = "graph"
    EAGER = "eager"


class PassMode(Enum):
    """What a missing expert means in a pass: fetched on the spot, or left out and counted."""

    INLINE = "inline"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The batch of a step. Rows `count`.. of every tensor a layer sees are padding.

    prefill: bool [count], which live tokens belong to a prompt (a scan, for caches); None = none of them.
    eager: the caller runs this step in eager code anyway (a long prefill), so misses are served inline at once.
    """

    count: int
    prefill: BoolArray | None = None
    eager: bool = False

    def check(self) -> None:
        """StepError for numbers that no batch has."""
        if self.count < 0:
            raise StepError(f"a step has at least 0 live tokens, not {self.count}")
        if self.prefill is not None and self.prefill.shape != (self.count,):
            raise StepError(f"prefill must have one flag for each of the {self.count} live tokens")


@dataclass(frozen=True, slots=True)
class RowFailure:
    """An expert that could not be read on one rank. `layer_id` is the model's own layer number."""

    layer_id: int
    expert: int
    rank: int
    message: str

    def __str__(self) -> str:
        return f"expert {self.expert} of layer {self.layer_id} could not be read on rank {self.rank}: {self.message}"


@dataclass(frozen=True, slots=True)
class StepResult(Generic[T]):
    """What a step returned.

    value: what the last forward pass returned. passes: forward passes run, the same on every rank.
    misses_first_pass: (token, choice) pairs of live tokens whose expert had no slot, on this rank; 0 for a step that
    nobody waited for, which the metrics tell later.
    outcome: clean (nothing was missing), inline (the device fetched what was, or may have), streamed (an eager pass
    that touched no slot), replayed, exact, tolerated, failed.
    failures, failed_tokens (bool [count], None without failures): union over ranks, the same on every rank;
    the result of a failed token is not valid.
    """

    value: T
    outcome: Outcome
    passes: int
    misses_first_pass: int
    failures: tuple[RowFailure, ...] = ()
    failed_tokens: BoolArray | None = None


@dataclass(slots=True)
class StepState:
    """Counts of one step. deferred: they are still on their way from the device when the step returns.

    seconds: where its time went, by STEP_PARTS; empty if nobody looked.
    """

    tokens: StepTokens
    epoch: int
    deferred: bool = False
    routed_pairs: int = 0
    missed_pairs: int = 0
    replay_routed_pairs: int = 0
    replay_missed_pairs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)  # of the pass whose result the step returned


class Route(NamedTuple):
    """Where layers of a pass sent their live tokens: experts int64 [G], pairs int64 [G].

    layer: of all of them, or int64 [G]. No (layer, expert) is in it twice.
    """

    layer: int | IntArray
    experts: IntArray
    pairs: IntArray


@dataclass(slots=True)
class PassState:
    """Everything one forward pass learns. A new pass starts with a new one: nothing is pinned for longer.

    used: key -> weight of the rows the pass computed with. missed: the same of those it left out (replay mode).
    failures: key -> reason of rows that could not be read (inline mode), failed_tokens: bool [count].
    """

    mode: PassMode
    first: bool
    step: StepState
    routes: list[Route] = field(default_factory=list)
    used: dict[int, float] = field(default_factory=dict)
    missed: dict[int, float] = field(default_factory=dict)
    missing_pairs: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    failed_tokens: BoolArray | None = None

    def count(self, routed: int, missing: int) -> None:
        """Record pairs of live tokens that layers of this pass were routed to, and those without a slot."""
        if self.first:
            self.step.routed_pairs += routed
            self.step.missed_pairs += missing
        else:
            self.step.replay_routed_pairs += routed
            self.step.replay_missed_pairs += missing

    def fail(self, key: int, reason: str, tokens: IntArray) -> None:
        """Record that `tokens` (indices) lack the contribution of `key`."""
        self.failures[key] = reason
        if self.failed_tokens is None:
            self.failed_tokens = np.zeros(self.step.tokens.count, dtype=np.bool_)
        self.failed_tokens[tokens] = True
