"""Services whose layers look ahead: the same results, the same pool, and refusals where nobody could."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.admissions import admission_of
from support.fake_moe import EXPERTS, LAYERS, FakeModel, FakePacks, Passes, bits_equal, tiers
from ziggurat.kernels.lookahead import Guess
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.inline.layers import GuessOf
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.runtime_errors import StepError

ROWS = LAYERS * EXPERTS
WIDTH = 3


def guessing(model: FakeModel, asked: list[int] | None = None) -> GuessOf:
    """The next layer's router asked about the layer's input."""

    def guess(layer: int) -> Guess:
        if asked is not None:
            asked.append(layer)
        return lambda x: model.route(layer, x.float())[1][:, :WIDTH]

    return guess


def ahead(mode: str = "inline") -> dict[str, Any]:
    return {"mode": mode, "lookahead": WIDTH}


@pytest.mark.parametrize("places", [ROWS, 5])
@pytest.mark.parametrize("slots", [24, 9, 3])
def test_results_pool_and_books_are_those_without(
    packs: FakePacks, model: FakeModel, slots: int, places: int
) -> None:
    options: dict[str, Any] = {"slots": slots, "places": places, "inline": True, "slot_seed": 7}
    with (
        tiers(packs, **options, miss={"mode": "inline"}) as plain,
        tiers(packs, **options, miss=ahead()) as service,
    ):
        service.lookahead.by(guessing(model))
        runs = [Passes(model, plain), Passes(model, service)]
        for one in (plain, service):
            one.warm_start()
            one.preheated()
        for step, tokens in enumerate((1, 4, 1, 96, 4, 1, 2, 16, 17, 1)):
            x = model.inputs(tokens, seed=step)
            results = [run.step(x, StepTokens(tokens), padding=3) for run in runs]
            assert bits_equal(results[0].value, results[1].value)
            for one in (plain, service):
                one.collect()
                one.slots.check()
            if places < ROWS:  # a thread brings rows to the arena when it gets to it
                continue
            assert results[0].outcome == results[1].outcome
            a, b = admission_of(plain), admission_of(service)
            for part in ("table", "owners", "heat", "last", "state", "log"):
                assert torch.equal(getattr(a, part), getattr(b, part)), (step, part)
        counts = service.lookahead.counts()
        assert counts.guessed >= counts.matched
        if slots > WIDTH and places == ROWS:
            assert counts.matched > 0
        assert plain.lookahead.counts().guessed == 0


def test_every_layer_but_the_first_is_asked_about_unless_it_has_no_slots(
    packs: FakePacks, model: FakeModel
) -> None:
    # A layer that is read in place fetches nothing, for the one behind it neither.
    for direct, expected in (([], [1, 2, 3]), ([2], [1])):
        asked: list[int] = []
        options: dict[str, Any] = {"direct": direct} if direct else {}
        with tiers(packs, slots=12, places=ROWS, inline=True, miss=ahead("auto"), **options) as service:
            service.lookahead.by(guessing(model, asked))
            x = model.inputs(2)
            result = Passes(model, service).step(x)
            assert bits_equal(result.value, packs.reference(model, x))
        assert sorted(set(asked)) == expected


def test_a_pass_that_breaks_off_leaves_nothing_behind(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=12, places=ROWS, inline=True, miss=ahead()) as service:
        service.lookahead.by(guessing(model))
        service.warm_start()
        service.preheated()
        settled = []
        kernels = service._layers._kernels  # type: ignore[union-attr]
        settle = kernels.settle
        kernels.settle = lambda: settled.append(settle())  # type: ignore[method-assign]

        def broken(path: object) -> torch.Tensor:
            h = model.inputs(1, seed=9)
            weights, ids = model.route(0, h)
            service.moe(0, h, weights, ids)
            raise RuntimeError("the model failed")

        with pytest.raises(RuntimeError, match="the model failed"):
            service.run_step(broken, StepTokens(1))
        run = Passes(model, service)
        for step in range(4):
            x = model.inputs(2, seed=step)
            assert bits_equal(run.step(x).value, packs.reference(model, x))
        assert settled == [None]


def test_nobody_looks_ahead_where_it_is_not_configured_or_nothing_is_fetched(
    packs: FakePacks, model: FakeModel
) -> None:
    with tiers(packs, slots=12, places=ROWS, inline=True) as service:
        with pytest.raises(StepError, match=r"set miss\.lookahead"):
            service.lookahead.by(guessing(model))
        assert service.lookahead.counts().guessed == 0
    with tiers(packs, slots=ROWS, places=ROWS, inline=True, miss=ahead()) as service:
        assert service._inline is not None
        assert service._inline.layers.lookahead is None, "a pool with every row has nothing to fetch"
    with (
        pytest.raises(ConfigError, match=r"miss.lookahead: 3 guesses a token.*\(miss.mode is replay\)"),
        tiers(packs, slots=12, places=ROWS, on_device=True, miss=ahead("replay")),
    ):
        pass
