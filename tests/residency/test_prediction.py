"""Predicted decode steps: misses from routing or heat, and the time they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ziggurat.residency.prediction import (
    GATHER_SHARE,
    Misses,
    PredictionError,
    StepEstimate,
    load_routing,
    misses_of_heat,
    misses_of_routing,
    side_by_side,
)


def test_a_step_takes_its_work_and_its_rows() -> None:
    estimate = StepEstimate(1, Misses(10.0, 0.25), 7_000_000, 50.0, 2.0)
    assert estimate.fetch_ms == pytest.approx(70e6 / (50e9 * GATHER_SHARE) * 1e3)
    assert estimate.step_ms == pytest.approx(2.0 + estimate.fetch_ms)
    assert "10.0 rows missed a step (25.0% of" in estimate.line()
    assert estimate.line().endswith(f"{estimate.step_ms:.2f} ms a step")


def test_without_the_work_only_the_link_is_known() -> None:
    estimate = StepEstimate(8, Misses(10.0, 0.25), 7_000_000, 50.0)
    assert estimate.step_ms is None
    assert estimate.line().startswith("decode of 8 tokens: ")
    assert estimate.line().endswith("on a link of 50.0 GB/s")


def test_routing_that_stays_misses_nothing() -> None:
    ids = np.tile(np.array([[[[0, 1]], [[2, 3]]]]), (20, 1, 1, 1))
    assert misses_of_routing(ids, 8, 4, warm=5) == Misses(0.0, 0.0)
    assert misses_of_routing(ids, 8, 4, warm=0).rows == pytest.approx(4 / 20)


def test_routing_that_goes_round_a_small_pool_misses_everything() -> None:
    ids = (np.arange(40) % 8)[:, None, None, None]
    found = misses_of_routing(ids, 8, 1, warm=8)
    assert found == Misses(1.0, 1.0)


def test_a_larger_pool_misses_less() -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 16, (200, 3, 2, 2)) // random.integers(1, 4, (200, 3, 2, 2))
    shares = [misses_of_routing(ids, 16, slots, warm=20).share for slots in (8, 16, 32, 48)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-2] > shares[-1]


def test_heat_tells_how_often_the_cold_ones_are_wanted() -> None:
    heat = np.array([[8.0, 4.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0]])
    # One pair of each token in each layer; the hottest four are two of either layer.
    found = misses_of_heat(heat, 1, 4, tokens=1)
    assert found.rows == pytest.approx(2 / 16 + 2 / 16 + 1 / 4 + 1 / 4)
    assert found.share == pytest.approx(found.rows / 2)
    assert misses_of_heat(heat, 1, 8, tokens=1) == Misses(0.0, 0.0)


def test_more_tokens_want_more_of_the_cold_ones_but_each_once() -> None:
    heat = np.ones((1, 4))
    one, many = (misses_of_heat(heat, 2, 2, tokens=tokens) for tokens in (1, 50))
    assert one.rows == pytest.approx(1.0)
    assert many.rows == pytest.approx(2.0, abs=1e-9)


def test_a_layer_without_heat_tells_nothing() -> None:
    with pytest.raises(PredictionError, match="no heat"):
        misses_of_heat(np.array([[1.0, 1.0], [0.0, 0.0]]), 1, 2, tokens=1)


def test_warm_steps_have_to_leave_some() -> None:
    with pytest.raises(PredictionError, match="5 steps"):
        misses_of_routing(np.zeros((5, 1, 1, 1), dtype=int), 2, 1, warm=5)


def test_sequences_side_by_side() -> None:
    routing = np.arange(4 * 3 * 2 * 1).reshape(4, 3, 2, 1)
    steps = side_by_side(routing, 2)
    assert steps.shape == (6, 2, 2, 1)
    assert steps[3, 1].tolist() == [[routing[2, 0, 1, 0]], [routing[3, 0, 1, 0]]]
    with pytest.raises(PredictionError, match="4 sequences, not the 5"):
        side_by_side(routing, 5)


def test_files_that_are_no_routing(tmp_path: Path) -> None:
    np.savez(tmp_path / "floats.npz", ids=np.zeros((1, 2, 3, 4)))
    np.savez(tmp_path / "counts.npz", counts=np.zeros(3))
    (tmp_path / "text.npz").write_text("text")
    for name, message in (
        ("floats", "float64"),
        ("counts", "neither"),
        ("text", "no trace"),
        ("gone", "no trace"),
    ):
        with pytest.raises(PredictionError, match=message):
            load_routing(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "good.npz", ids=np.zeros((1, 2, 3, 4), dtype=np.uint8))
    assert load_routing(tmp_path / "good.npz").shape == (1, 2, 3, 4)
