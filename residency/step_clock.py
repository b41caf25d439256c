"""Where the time of a step goes, as its host sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ziggurat.residency.passes import PassPath

T = TypeVar("T")


class StepClock:
    """Times one step from its making on.

    fetched: seconds that fetches have taken so far in all; those within the step are a part of their own. A pass lasts
    until the next one begins or the step ends, so waiting for the device is in it.
    """

    def __init__(self, fetched: Callable[[], float]) -> None:
        self._fetched = fetched
        self._marks = [(time.perf_counter(), fetched())]

    def watch(self, forward: Callable[[PassPath], T]) -> Callable[[PassPath], T]:
        """`forward`, noticed each time it is called."""

        def watched(path: PassPath) -> T:
            self._mark()
            return forward(path)

        return watched

    def parts(self) -> dict[str, float]:
        """Seconds of each of STEP_PARTS until now; together the time of the step."""
        self._mark()
        (begun, before), *later = self._marks
        # What comes ahead of the first pass is its preparation.
        second = later[1] if len(later) > 2 else later[-1]
        end = later[-1]
        first_fetch, all_fetch = second[1] - before, end[1] - before
        return {
            "first_pass": second[0] - begun - first_fetch,
            "repeated_passes": end[0] - second[0] - (all_fetch - first_fetch),
            "fetch": all_fetch,
        }

    def _mark(self) -> None:
        self._marks.append((time.perf_counter(), self._fetched()))
