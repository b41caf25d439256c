"""What guesses are worth: the order of rows on the link, misses that guesses do not change, and the report."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lookahead import judge, measured_times
from bench.lookahead_model import LayerMisses, Moment, Times, limit_us, misses, step_us
from ziggurat.residency.admission_model import AdmissionModel

TIMES = Times(dense=10.0, moe=20.0, row=100.0)


def layer(routed: set[int], missing: set[int], guessed: tuple[int, ...] = ()) -> LayerMisses:
    return LayerMisses(frozenset(routed), frozenset(missing), guessed)


def test_without_guesses_work_and_rows_add_up() -> None:
    step = [layer({0, 1}, {1}), layer({2, 3}, {2, 3}), layer({4}, set())]
    assert step_us(step, TIMES, Moment.MOE_INPUT) == 3 * 30 + 300
    assert limit_us(step, TIMES) == 300
    assert limit_us(step[2:], TIMES) == 30


@pytest.mark.parametrize(("moment", "saved"), [(Moment.MOE_INPUT, 30.0), (Moment.LAYER_OUTPUT, 10.0)])
def test_a_right_guess_travels_while_work_goes_on(moment: Moment, saved: float) -> None:
    step = [layer({0}, set()), layer({1}, {1}, (1,))]
    assert step_us(step, TIMES, moment) == 60 + 100 - saved


def test_a_wrong_guess_holds_up_the_rows_behind_it() -> None:
    step = [layer({0}, set()), layer({1}, {1}, (2,))]
    assert step_us(step, TIMES, Moment.MOE_INPUT) == 60 + 200 - 30
    assert step_us(step, TIMES, Moment.MOE_INPUT, cancel=True) == 60 + 100


def test_cancelling_lets_a_right_guess_behind_a_wrong_one_move_up() -> None:
    step = [layer({0}, set()), layer({1}, {1}, (2, 1))]
    assert step_us(step, TIMES, Moment.MOE_INPUT) == 60 + 200 - 30
    assert step_us(step, TIMES, Moment.MOE_INPUT, cancel=True) == 60 + 100
    step = [layer({0}, set()), layer({1}, {1}, (1, 2)), layer({3}, {3})]
    assert step_us(step, TIMES, Moment.MOE_INPUT) == 90 + (100 - 30) + 170
    assert step_us(step, TIMES, Moment.MOE_INPUT, cancel=True) == 90 + (100 - 30) + 100


def test_a_wrong_guess_on_an_idle_link_costs_nothing() -> None:
    quick = Times(dense=10.0, moe=20.0, row=5.0)
    step = [layer({0}, set()), layer({1}, {1}, (2,))]
    assert step_us(step, quick, Moment.MOE_INPUT) == 60 + 5


def test_guesses_leave_the_pool_alone_and_skip_what_it_holds() -> None:
    random = np.random.default_rng(1)
    plain, guessing = AdmissionModel(2, 8, 6), AdmissionModel(2, 8, 6)
    for _ in range(30):
        ids = np.stack([[random.permutation(8)[:2] for _ in range(2)] for _ in range(2)])
        guess = random.permutation(8)[None, :5]
        here = set(guessing.resident(1).tolist())
        with_guess = misses(ids, [None, guess], guessing)
        without = misses(ids, [None, None], plain)
        assert [one.missing for one in with_guess] == [one.missing for one in without]
        assert with_guess[1].routed == set(ids[1].reshape(-1).tolist())
        # Layer 0 may have evicted a guessed expert since.
        assert set(guess.reshape(-1).tolist()) - here <= set(with_guess[1].guessed)
    assert with_guess[0].guessed == ()


def test_first_guesses_of_all_tokens_come_first() -> None:
    ids = np.array([[[0, 1], [0, 1]]])
    found = misses(ids, [np.array([[5, 2, 3], [4, 5, 2]])], AdmissionModel(1, 8, 4))
    assert found[0].guessed == (5, 4, 2, 3)


def test_a_report_of_perfect_guesses() -> None:
    random = np.random.default_rng(2)
    ids = np.stack([random.permutation(8)[:2] for _ in range(2 * 80 * 3)]).reshape(2, 80, 3, 2)
    times = measured_times(1)
    run = judge(ids, ids, 1, 0.25, Moment.MOE_INPUT, times)
    assert run["recall"] == run["recall_missing"] == 1.0
    assert run["wrong_share"] == 0.0
    us = run["layer_us"]
    assert us["limit"] <= us["with"] == us["perfect"] <= us["without"]
    wrong = judge(ids, (ids + 1) % 8, 1, 0.25, Moment.MOE_INPUT, times)
    assert wrong["layer_us"]["without"] == us["without"]
    assert wrong["layer_us"]["with"] > us["without"] >= wrong["layer_us"]["cancelled"] - 0.1
