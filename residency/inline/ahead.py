"""Looking ahead, as a service offers it: who guesses, and what came of it."""

from __future__ import annotations

from ziggurat.kernels.lookahead import NOTHING_GUESSED, LookaheadCounts
from ziggurat.residency.inline.layers import GuessOf, InlineLayers
from ziggurat.residency.runtime_errors import StepError


class LookingAhead:
    """Of a service's layers, whatever kind they are."""

    def __init__(self, layers: object) -> None:
        self._layers = layers if isinstance(layers, InlineLayers) else None

    @property
    def possible(self) -> bool:
        """Whether layers have spares to fetch to."""
        return self._layers is not None and self._layers.lookahead is not None

    def by(self, guess_of: GuessOf | None) -> None:
        """Have layers fetch what `guess_of` says, `miss.lookahead` experts a token, from the next launch or capture on;
        None: nothing. StepError for layers that have no spares."""
        if self._layers is None or self._layers.lookahead is None:
            raise StepError("no layer looks ahead: set miss.lookahead, and let misses be served inline")
        self._layers.guess_of = guess_of

    def counts(self) -> LookaheadCounts:
        """What came of guesses since the start; waits for the device. Nothing where no layer looks ahead. The metrics
        say the same of steps that have been booked, and wait for nothing."""
        if self._layers is None or self._layers.lookahead is None:
            return NOTHING_GUESSED
        return LookaheadCounts.of(self._layers.lookahead.words.tolist())
