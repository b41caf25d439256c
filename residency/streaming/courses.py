"""Which experts of a layer come together, on the host and as slot tables on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.slots import ABSENT
from ziggurat.residency.transfers import EventFactory, Uploads

Indices = npt.NDArray[np.intp]


class Place(NamedTuple):
    """A part of a pass: the `number`-th of a layer's experts, for one part of the batch's tokens."""

    layer: int
    tokens: int
    number: int


@dataclass(frozen=True, slots=True)
class Course:
    """How the absent experts of a layer come: `rows` at a time, in ascending order."""

    experts: Indices
    rows: int

    def __len__(self) -> int:
        """Parts."""
        return -(-len(self.experts) // self.rows)

    def part(self, number: int) -> Indices:
        """The experts of a part; the i-th of them is in row i of the staging part."""
        return self.experts[number * self.rows : (number + 1) * self.rows]


def places(courses: Mapping[int, Course], first: Place, token_parts: int) -> Iterator[Place]:
    """Places from `first` on, in the order in which they are computed, up to the first layer without a course."""
    layer, tokens, number = first
    while layer in courses:
        while tokens < token_parts:
            while number < len(courses[layer]):
                yield Place(layer, tokens, number)
                number += 1
            tokens, number = tokens + 1, 0
        layer, tokens = layer + 1, 0


class CourseTables:
    """Slot tables of the parts of a layer, made on the device from one upload for a whole pass.

    An upload of their own for every part would queue behind the rows that are on their way over the same link.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        rows: int,
        device: torch.device,
        *,
        events: EventFactory | None = None,
    ) -> None:
        self._shape = (layers, experts)
        self._rows = rows
        # Per layer: the slots of resident experts, and the position of each absent one in its course.
        self._numbers = torch.full((2 * layers, experts), ABSENT, dtype=torch.int32, device=device)
        self._starts = torch.arange(0, experts, rows, dtype=torch.int32, device=device)[:, None]
        self._uploads = Uploads((2 * layers, experts), torch.int32, device, depth=2, events=events)

    def show(self, table: npt.NDArray[np.int32], courses: Mapping[int, Course]) -> None:
        """The slots of all layers, int32 [L, E], and the courses of some."""
        layers, experts = self._shape
        values = np.full((2 * layers, experts), ABSENT, dtype=np.int32)
        values[:layers] = table
        for layer, course in courses.items():
            values[layers + layer, course.experts] = np.arange(len(course.experts))
        self._uploads.send(values, self._numbers)

    def show_course(self, layer: int, course: Course) -> None:
        """The course of one layer."""
        layers, experts = self._shape
        values = np.full((1, experts), ABSENT, dtype=np.int32)
        values[0, course.experts] = np.arange(len(course.experts))
        self._uploads.send(values, self._numbers[layers + layer :])

    def resident(self, layer: int) -> torch.Tensor:
        """int32 [E]: the slots of a layer's resident experts."""
        return self._numbers[layer]

    def parts(self, layer: int, count: int) -> torch.Tensor:
        """int32 [count, E]: the row of each expert within each part of its layer's course, -1 where it is not in it."""
        local = self._numbers[self._shape[0] + layer] - self._starts[:count]
        return local.masked_fill_((local < 0) | (local >= self._rows), ABSENT)
