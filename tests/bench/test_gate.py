"""What the identity gate runs, and that it can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.gate_engine import (
    OUTCOMES,
    ROWS,
    Case,
    Part,
    _judge,
    _judge_case,
    _judge_guesses,
    jobs,
    workloads,
)
from ziggurat.integration.determinism.compare import Outcome
from ziggurat.integration.vllm.capture import CapturedStep
from ziggurat.residency.config import TiersConfig


def test_jobs_survive_their_way_to_the_child(tmp_path: Path) -> None:
    for cpu in (False, True):
        for part in jobs(tmp_path, cpu=cpu).values():
            assert Part.from_json(part.to_json()) == part
            TiersConfig.from_mapping(part.config)


def test_pools_of_every_size_are_in_it(tmp_path: Path) -> None:
    parts = jobs(tmp_path, cpu=False)
    sizes = {case.slots for case in parts["full"].cases}
    assert {ROWS, ROWS // 2, ROWS // 4, ROWS * 19 // 100} <= sizes
    assert any(size < 32 for size in sizes), "fewer slots than a layer has experts"
    assert max(parts["full"].batches) == 32
    assert parts["full"].cases[0].slots == ROWS, "the reference comes first"
    batches = workloads(parts["full"].batches)
    assert len(batches["decode 32"]) == 32
    assert len({len(prompt) for prompt in batches["mixed prefill"]}) > 20


def test_an_arena_that_lacks_rows_is_in_it_beside_a_pool_that_has_staging_memory(tmp_path: Path) -> None:
    for cpu in (False, True):
        parts = jobs(tmp_path, cpu=cpu)
        part, full = parts["inline-disk"], parts["full"]
        pool = int(part.config["tiers"]["device"]["size"].removesuffix(" rows"))
        assert max(case.slots for case in part.cases) <= pool < ROWS
        assert set(part.batches) <= set(full.batches), "whose answers are there to compare with"
        sizes = {case.slots for case in full.cases}
        assert {case.slots for case in part.cases} == sizes - {ROWS}
        assert any(case.control for case in part.cases)
        assert max(part.batches) == max(full.batches)
    assert any(case.repeat > 1 for case in jobs(tmp_path, cpu=False)["inline-disk"].cases)
    assert any(case.shuffle for case in jobs(tmp_path, cpu=False)["inline-disk"].cases)


def outcome(value: float) -> Outcome:
    step = CapturedStep(("a",), (1,), np.array([[value]], dtype=np.float32))
    return Outcome(((1,),), (step,))


COUNTS = {**dict.fromkeys(OUTCOMES, 0), "clean": 1, "passes": 1, "missed": 0}
EXACT = {"clean": 0, "exact": 1, "passes": 3, "missed": 9}


@pytest.mark.parametrize(
    ("case", "found", "counts", "good"),
    [
        (Case("all", ROWS), 1.0, {}, True),
        (Case("all", ROWS), 1.5, {}, False),
        (Case("all", ROWS), 1.0, {"missed": 1, "passes": 2}, False),
        (Case("few", 20), 1.0, EXACT, True),
        (Case("few", 20), 1.5, EXACT, False),
        (Case("off", 20, control=True), 1.5, {"missed": 9}, True),
        (Case("off", 20, control=True), 1.0, {"missed": 9}, False),
    ],
    ids=str,
)
def test_verdicts_on_batches(case: Case, found: float, counts: dict[str, int], good: bool) -> None:
    assert _judge(case, "decode 1", outcome(1.0), outcome(found), {**COUNTS, **counts}) is good


@pytest.mark.parametrize(("own", "good"), [(1.0, True), (1.5, False)])
def test_an_inline_engine_also_gives_its_own_resident_answer(own: float, good: bool) -> None:
    assert _judge(Case("few", 20), "decode 1", outcome(1.0), outcome(1.0), dict(COUNTS), outcome(own)) is good


@pytest.mark.parametrize(
    ("part", "slots", "counts", "good"),
    [
        ("full", ROWS, {}, True),
        ("full", 20, {}, False),
        ("full", 20, EXACT, True),
        ("full", 20, {"missed": 9}, False),
        ("eager", 20, {"missed": 9}, True),
        ("eager", 20, {}, False),
        ("inline", 20, {"missed": 9}, True),
        ("inline", 20, EXACT, False),
        ("inline-disk", 20, EXACT, True),
        ("inline-disk", 20, {"missed": 9}, False),
    ],
)
def test_verdicts_on_cases(tmp_path: Path, part: str, slots: int, counts: dict[str, int], good: bool) -> None:
    job = jobs(tmp_path, cpu=False)[part]
    assert _judge_case(job, Case("case", slots), {**COUNTS, **counts}) is good


def test_looking_ahead_for_nothing_proves_nothing(tmp_path: Path) -> None:
    parts = jobs(tmp_path, cpu=False)
    case = Case("case", ROWS // 4)
    assert parts["ahead"].config["miss"]["lookahead"] == 4
    assert parts["ahead"].whole
    assert not _judge_guesses(parts["ahead"], case, 0)
    assert _judge_guesses(parts["ahead"], case, 7)
    assert _judge_guesses(parts["inline"], case, 0)
