"""What came of guesses reaches the metrics with the counts of passes, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.fake_moe import EXPERTS, LAYERS, FakeModel, FakePacks, Passes, tiers
from ziggurat.kernels.lookahead import CHUNK_BYTES, FETCHED, GUESSED, MATCHED, USED, LookaheadCounts
from ziggurat.residency import late_books, transfers
from ziggurat.residency.inline.layers import InlineLayers
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.service import ExpertService

ROWS = LAYERS * EXPERTS
WIDTH = 3
NAMES = ("guessed_rows", "wanted_rows", "fetched_bytes", "used_bytes")


@contextmanager
def looking_ahead(packs: FakePacks, model: FakeModel, **options: Any) -> Iterator[ExpertService]:
    """The next layer's router asked about the layer's input."""
    with tiers(
        packs, slots=12, inline=True, miss={"mode": "inline", "lookahead": WIDTH}, **options
    ) as service:
        service.lookahead.by(lambda layer: lambda x: model.route(layer, x.float())[1][:, :WIDTH])
        service.warm_start()
        service.preheated()
        yield service


def booked(metrics: TierMetrics) -> list[float]:
    """As a scrape finds them."""
    found = {s.spec.name: s.value for s in metrics.samples()}
    return [found[f"ziggurat_lookahead_{name}_total"] for name in NAMES]


def expected(counts: LookaheadCounts) -> list[float]:
    return [counts.guessed, counts.matched, counts.fetched * CHUNK_BYTES, counts.used * CHUNK_BYTES]


@pytest.mark.parametrize("places", [ROWS, 30])
def test_the_metrics_are_what_the_device_counted(packs: FakePacks, model: FakeModel, places: int) -> None:
    """With an arena of every row nobody waits for a step; with a smaller one each step is waited for."""
    with looking_ahead(packs, model, places=places) as service:
        run = Passes(model, service)
        outcomes = set()
        for step, tokens in enumerate((1, 4, 1, 96, 2, 1, 16, 17, 1)):
            outcomes.add(run.step(model.inputs(tokens, seed=step), StepTokens(tokens), padding=3).outcome)
            if step % 3 == 0:
                service.collect()
                assert booked(service.metrics) == expected(service.lookahead.counts())
        service.collect()
        counts = service.lookahead.counts()
        assert booked(service.metrics) == expected(counts)
        assert counts.guessed >= counts.matched > 0
        assert counts.fetched >= counts.used > 0
        assert "streamed" in outcomes
        assert ("replayed" in outcomes) == (places < ROWS)


def test_a_counter_of_the_device_that_begins_anew_goes_on(packs: FakePacks, model: FakeModel) -> None:
    """It has 32 bits; the metrics have more."""
    with looking_ahead(packs, model, places=ROWS) as service:
        assert isinstance(service._layers, InlineLayers)
        assert service._layers.lookahead is not None
        words, run = service._layers.lookahead.words, Passes(model, service)
        for word in (GUESSED, MATCHED, FETCHED, USED):
            words[word] = -30
        run.step(model.inputs(1))
        service.collect()
        for seed in range(6):
            run.step(model.inputs(2, seed=seed))
        service.collect()
        counts = service.lookahead.counts()
        assert counts.guessed < 1 << 31, "it has begun anew"
        whole = LookaheadCounts(
            *(getattr(counts, name) + (1 << 32) for name in ("guessed", "matched", "fetched", "used"))
        )
        assert booked(service.metrics) == expected(whole)


class SlowEvent:
    """An event of a device that is behind until `done`."""

    done = False
    waited = 0

    def record(self) -> None:
        return

    def query(self) -> bool:
        return SlowEvent.done

    def synchronize(self) -> None:
        SlowEvent.waited += 1


def test_a_scrape_does_not_wait_for_the_device(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowEvent, "done", False)
    monkeypatch.setattr(transfers, "events_of", lambda device: SlowEvent)
    monkeypatch.setattr(late_books, "QUIET_SECONDS", 3600.0)
    with looking_ahead(packs, model, places=ROWS) as service:
        run = Passes(model, service)
        run.step(model.inputs(2))
        before = SlowEvent.waited
        for seed in range(4):
            run.step(model.inputs(2, seed=seed))
        service.collect(wait=False)
        assert booked(service.metrics) == [0, 0, 0, 0], "nothing has arrived"
        assert SlowEvent.waited == before
        monkeypatch.setattr(SlowEvent, "done", True)
        service.collect(wait=False)
        assert booked(service.metrics) == expected(service.lookahead.counts())
        assert booked(service.metrics)[0] > 0


def test_the_words_travel_with_the_counts_of_passes(packs: FakePacks, model: FakeModel) -> None:
    with looking_ahead(packs, model, places=ROWS) as service:
        assert isinstance(service._layers, InlineLayers)
        lookahead, state = service._layers.lookahead, service._layers._device
        assert lookahead is not None
        assert lookahead.words.untyped_storage().data_ptr() == state.more.untyped_storage().data_ptr()
        line = 128  # bytes that a device writes together: another kernel's words are in none of these
        at = lookahead.words.data_ptr() - state.more.data_ptr()
        assert at % line == 0
        assert at >= state.admission.state.nbytes
        log = state.admission.log.data_ptr() - state.more.data_ptr()
        assert log % line == 0
        assert log >= at + lookahead.words.nbytes


@pytest.mark.parametrize(
    ("inline", "miss"),
    [(True, {"mode": "inline"}), (False, {"mode": "replay"}), (True, {"lookahead": WIDTH})],
)
def test_nothing_is_counted_where_nobody_looks_ahead(
    packs: FakePacks, model: FakeModel, inline: bool, miss: dict[str, Any]
) -> None:
    """In the last case layers could, and nobody guesses."""
    with tiers(packs, slots=12, places=ROWS, on_device=True, inline=inline, miss=miss) as service:
        run = Passes(model, service)
        for seed in range(3):
            run.step(model.inputs(2, seed=seed))
        service.collect()
        assert booked(service.metrics) == [0, 0, 0, 0]
