"""Whether misses are served by the device itself, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ziggurat.residency.consensus import Consensus
from ziggurat.residency.errors import ConfigError

Serving = Literal["host", "inline", "replay"]
SERVINGS: tuple[Serving, ...] = ("host", "inline", "replay")


@dataclass(frozen=True, slots=True)
class MappedArena:
    """The arena as the device sees it, uint8 [places, stride], or None and why it does not see it."""

    view: torch.Tensor | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MissChoice:
    """Who serves misses: `host`, layer by layer in eager code; `inline`, the device within the pass; `replay`, the host
    between passes. reason: why, for the log."""

    serving: Serving
    reason: str


def choose(
    wanted: Literal["auto", "inline", "replay"],
    mapped: MappedArena | None,
    *,
    on_host: bool,
    caches: bool,
    whole_pool: bool,
    consensus: Consensus,
) -> MissChoice:
    """The same on every rank.

    wanted: `miss.mode`. on_host: the host computes the layers. mapped: None = nobody asked. caches: whether the arena
    has places beyond those for reads in flight. whole_pool: whether the pool has a slot for every row.
    """
    if wanted == "replay":
        return MissChoice("replay", "miss.mode is replay")
    if on_host:
        return MissChoice("host", "the host computes the layers")
    why = "nobody offered the arena to the device" if mapped is None else mapped.reason
    if mapped is not None and mapped.view is not None and not caches:
        why = "there is no arena to cache rows in; set tiers.host.size"
    able = mapped is not None and mapped.view is not None and caches
    if mapped is not None and consensus.size > 1:
        everyone = consensus.gather((able, whole_pool, why))
        why = next((reason for can, _, reason in everyone if not can), why)
        able, whole_pool = (all(one[i] for one in everyone) for i in (0, 1))
    if wanted == "auto" and (whole_pool or not able):
        return MissChoice("replay", "the pool has a slot for every expert" if whole_pool else why)
    if not able:
        return MissChoice("host", why)
    return MissChoice("inline", "the device reads the arena")


def check_lookahead(guesses: int, choice: MissChoice, *, whole_pool: bool) -> None:
    """Raises ConfigError if rows are to be fetched ahead (`miss.lookahead` > 0) where the device fetches none. With a
    slot for every row there is nothing to fetch, and no reason to complain."""
    if guesses and choice.serving != "inline" and not whole_pool:
        raise ConfigError(
            f"miss.lookahead: {guesses} guesses a token, but no row is fetched by the device ({choice.reason}); "
            "set it to 0, or let misses be served inline"
        )
