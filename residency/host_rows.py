"""Rows on their way through the host arena: what is asked for, what arrives, what does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Source = Literal["arena", "pack"]
Role = Literal["cache", "staging", "early"]


@dataclass(frozen=True, slots=True)
class ArrivedRow:
    """A row in host memory. `row` (uint8 [stride]) is valid until its batch is settled.

    source: where it was found. seconds: time its read took (0 for a row the arena had).
    """

    key: int
    row: torch.Tensor
    source: Source
    seconds: float
    place: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that could not be read. verification: its bytes arrived but were wrong."""

    key: int
    reason: str
    verification: bool


@dataclass(slots=True)
class RowBatch:
    rows: list[ArrivedRow] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)


@dataclass(slots=True)
class FillReport:
    """What a background fill did. full: not every row found a place."""

    read: int = 0
    faults: list[RowFault] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    full: bool = False


@dataclass(slots=True)
class Reservation:
    key: int
    weight: float
    place: int
    role: Role = "cache"
