"""Guesses that the harness drives look-ahead with, and what it reports of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.harness import decode, inline
from bench.harness.decode import Case
from bench.harness.guesses import drawn_guesses, mapped_guesses, recall_of
from bench.harness.mapping import mapped
from bench.harness.measure import Run
from bench.harness.routing import TraceError, synthetic
from bench.harness.stack import Stack
from bench.lookahead import write_trace
from bench.shapes import SHAPES, MoeShape
from ziggurat.kernels.lookahead import CHUNK_BYTES, LookaheadCounts

SHAPE = SHAPES["deepseek-v4-flash"].with_layers(14)


@pytest.mark.parametrize("tokens", [1, 8])
def test_recorded_guesses_are_far_better_than_chance_and_are_no_choices(tokens: int) -> None:
    routing = mapped(inline.GUESSES, SHAPE, tokens, 40)
    recalls = []
    for width in (2, 3, 6):
        guesses = mapped_guesses(inline.GUESSES, SHAPE, tokens, 40, width)
        assert guesses.shape == (40, 14, tokens, width)
        without = [layer for layer in range(14) if (guesses[:, layer] == -1).all()]
        assert without == [0, 6, 12], "the trace's first layer has none before it"
        there = np.delete(guesses, without, axis=1)
        assert there.min() >= 0
        assert there.max() < SHAPE.experts
        assert all(len(set(one)) == width for one in there.reshape(-1, width).tolist())
        recalls.append(recall_of(guesses, routing))
    assert recalls == sorted(recalls)  # type: ignore[type-var]
    assert recalls[-1] is not None
    assert 0.4 < recalls[-1] < 0.8


def test_perfect_guesses_of_recorded_choices_are_the_routing(tmp_path: Path) -> None:
    """If the trace guesses what it routes to, the mapping guesses what it maps."""
    with np.load(inline.GUESSES) as file:
        routed = file["topk_ids"]
    trace = tmp_path / "perfect.npz"
    write_trace(trace, routed, routed)
    routing = mapped(trace, SHAPE, 2, 20)
    guesses = mapped_guesses(trace, SHAPE, 2, 20, SHAPE.top_k)
    assert recall_of(guesses, routing) == 1.0


def test_a_trace_without_guesses_is_refused() -> None:
    with pytest.raises(TraceError, match="holds no guesses"):
        mapped_guesses(inline.TRACE, SHAPE, 1, 4, 2)


def test_drawn_guesses_have_the_recall_that_was_asked_for() -> None:
    routing = synthetic(200, 3, 64, 4, 2, seed=5)
    for recall in (0.0, 0.5, 1.0):
        found = recall_of(drawn_guesses(routing, 4, recall), routing)
        assert found == pytest.approx(recall, abs=0.08)
    half = recall_of(drawn_guesses(routing, 2, 1.0), routing)
    assert half == 0.5
    assert recall_of(None, routing) is None
    assert (drawn_guesses(routing, 2, 1.0)[:, 0] == -1).all()


def test_what_a_report_says_of_guesses() -> None:
    routing = synthetic(6, 2, 8, 2, 1)

    stack = Stack(routing, 32, torch.device("cpu"))
    case = Case("one", routing, 2, stack, recall=0.61234)
    case.resident = Run(16, ms=[1.0] * 4, before_us=[1.0] * 4, host_us=[2.0] * 4)
    run = Run(4, ms=[2.0] * 4, passes=[1] * 4, misses=[3] * 4, rows=10)
    run.ahead = LookaheadCounts(8, 5, 64, 32)
    case.runs[0.25] = {decode.AHEAD: run}
    found = decode.report(case, 4096, 16, 50.0)
    assert found["recall"] == 0.6123
    said = found["runs"][0]["ahead"]["ahead"]
    mib = CHUNK_BYTES / 2**20
    assert said == {
        "guessed_rows_per_step": 2.0,
        "wanted_rows_per_step": 1.25,
        "recall_missing": 0.5,
        "fetched_mib_per_step": 16 * mib,
        "used_mib_per_step": 8 * mib,
        "wasted_mib_per_step": 8 * mib,
    }
    assert "2.00 rows guessed, 50% of the missing among them, 0.2 MiB used, 0.2 wasted" in decode.table(found)


def test_counts_wrap_around() -> None:
    before = LookaheadCounts((1 << 32) - 2, 1, 2, 3)
    assert LookaheadCounts(3, 1, 5, 7).since(before) == LookaheadCounts(5, 0, 3, 4)


def test_the_command_looks_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "demo", "--layers", "2", "--device", "cpu", "--parts", "decode", "--tokens", "2"]
    steps = ["--batch-warm", "2", "--batch-steps", "2", "--coverage", "25", "--lookahead", "2"]
    assert inline.main([*arguments, *steps, "--results", str(tmp_path), "--commit", "abc"]) == 0
    content = json.loads((tmp_path / "inline_ahead.json").read_text())
    assert content["lookahead"] == 2
    for one in content["cases"]:
        (run,) = one["runs"]
        assert run["ahead"]["same_bits"]
        assert run["ahead"]["missed_rows_per_step"] == run["inline"]["missed_rows_per_step"]
        assert 0 <= one["recall"] <= 1
    assert "25% ahead" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--lookahead", "17"], ["--modes", "ahead"], ["--lookahead", "2", "--recall", "2"]]
)
def test_arguments_that_guess_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        inline.main(["--device", "cpu", *arguments])


def test_a_stack_guesses_what_the_loaded_step_says() -> None:

    shape = MoeShape("tiny", layers=3, experts=16, top_k=4, hidden=64, intermediate=32)
    routing = synthetic(5, shape.layers, shape.experts, shape.top_k, 2)
    guesses = drawn_guesses(routing, 3, 0.5)
    stack = Stack(routing, shape.hidden, torch.device("cpu"), guesses=guesses)
    guess = stack.guess(2)
    for step in (3, 1):
        stack.load(step)
        assert guess(torch.zeros(2, 64)).tolist() == guesses[step, 2].tolist()
    assert stack.of_token(1).guess(1)(torch.zeros(1, 64)).shape == (1, 3)
