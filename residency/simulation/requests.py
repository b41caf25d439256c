"""What a simulated pool asks of the tier below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.events import Events
from ziggurat.residency.simulation.pools import Keys


@dataclass(slots=True)
class Requests:
    """What one pool asked for: keys and weights (0: wanted by a scan only) of one batch after the other.

    steps: how many batches there had been at the end of each step.
    """

    layers: int
    experts: int
    top_k: int
    batches: list[tuple[list[int], list[int]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, events: Events) -> Requests:
        """None yet, of a pool that `events` happen to."""
        return cls(events.layers, events.experts_per_layer, events.ids.shape[2])

    def ask(self, keys: Keys, weights: Keys) -> None:
        """A batch, of one layer."""
        self.batches.append((list(keys), list(weights)))

    def end_step(self) -> None:
        self.steps.append(len(self.batches))

    def by_step(self) -> Iterator[list[tuple[list[int], list[int]]]]:
        """The batches of each step."""
        first = 0
        for last in self.steps:
            yield self.batches[first:last]
            first = last

    def places_for(self, coverage: float) -> int:
        """Places of `coverage` percent of the experts."""
        if not 0.0 < coverage <= 100.0:
            raise SimulationError(f"an arena of {coverage} % is not between 0 and 100")
        return max(1, round(self.layers * self.experts * coverage / 100))
