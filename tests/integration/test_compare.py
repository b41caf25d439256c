"""The comparison behind `ziggurat replay` sees every bit, and says where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ziggurat.integration.determinism.cases import Job, make_cases, make_workloads
from ziggurat.integration.determinism.compare import Outcome, differences, neighbour_differences
from ziggurat.integration.vllm.capture import CapturedStep, LogitsCapture, read_capture


def step(names: tuple[str, ...], *values: float) -> CapturedStep:
    logits = np.array(values, dtype=np.float32).reshape(len(names), -1)
    return CapturedStep(names, tuple(1 for _ in names), logits)


BASE = Outcome(((5, 6),), (step(("a",), 1.0, 2.0), step(("a",), 3.0, 0.0)))


def test_equal_runs_have_no_differences() -> None:
    again = Outcome(((5, 6),), (step(("x",), 1.0, 2.0), step(("x",), 3.0, 0.0)))
    assert differences(BASE, again) == []


def test_each_kind_of_difference_is_found() -> None:
    assert differences(BASE, replace(BASE, tokens=((5, 7),))) == ["tokens differ"]
    assert differences(BASE, replace(BASE, steps=BASE.steps[:1])) == ["2 steps against 1"]
    other = replace(
        BASE, steps=(step(("a",), 1.0, np.nextafter(np.float32(2), np.float32(3))), BASE.steps[1])
    )
    [problem] = differences(BASE, other)
    assert problem.startswith("step 0: 1 of 2 logits differ")
    batch = replace(BASE, steps=(step(("a", "b"), 1.0, 2.0), BASE.steps[1]))
    assert "another batch" in differences(BASE, batch)[0]


def test_signed_zeros_and_nans_are_compared_by_their_bits() -> None:
    minus = replace(BASE, steps=(BASE.steps[0], step(("a",), 3.0, -0.0)))
    assert differences(BASE, minus)
    nan = replace(BASE, steps=(BASE.steps[0], step(("a",), 3.0, float("nan"))))
    assert differences(nan, nan) == []


def test_neighbours_are_compared_request_by_request() -> None:
    first = Outcome(((1, 1),), (step(("0",), 1.0, 2.0), step(("0",), 3.0, 4.0)))
    second = Outcome(((1, 1),), (step(("1",), 5.0, 6.0), step(("1",), 7.0, 8.0)))
    # The engine may reorder its batch between steps.
    together = Outcome(((1, 1), (1, 1)), (step(("p", "q"), 1, 2, 5, 6), step(("q", "p"), 7, 8, 3, 4)))
    assert neighbour_differences([first, second], together) == []
    moved = replace(together, steps=(together.steps[0], step(("q", "p"), 7, 8, 3, 4.5)))
    assert neighbour_differences([first, second], moved) == ["prompt 0 of the batch"]


def test_capture_keeps_bits_and_survives_a_killed_writer(tmp_path: Path) -> None:
    logits = torch.tensor([[1.5, -0.0], [float("inf"), 3.0]], dtype=torch.bfloat16)
    with LogitsCapture(tmp_path, 0) as capture:
        capture.add(["a", "b"], [3, 1], logits)
        capture.add(["a"], [1], logits[:1])
    path = tmp_path / "logits.rank0.npys"
    steps = list(read_capture(path))
    assert [s.requests for s in steps] == [("a", "b"), ("a",)]
    assert steps[0].tokens == (3, 1)
    assert np.array_equal(steps[0].logits.view(np.uint32), logits.float().numpy().view(np.uint32))
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(read_capture(path))) == 1


def test_a_job_travels_whole(tmp_path: Path) -> None:
    cases = make_cases(["50%", "1 rows"], ["inline", "replay"])
    assert [case.pool for case in cases] == ["100%", "50%", "50%", "1 rows", "1 rows", "50%", "50%"]
    workloads = make_workloads(["one", "two", "three"])
    assert workloads[4].prompts == ("three", "two", "one")
    assert workloads[4].alone == ("prompt 2 alone", "prompt 1 alone", "prompt 0 alone")
    job = Job("model", {"tiers": {}}, cases, workloads, 8)
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
