"""The transfer benchmark's arithmetic, over a link whose speeds are known; the GPU behind it is left to the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from bench import transfers
from bench.results_io import provenance, read_json
from bench.transfers import KIB, MIB, crossover, goals, measure
from ziggurat.allocators.movers import GATHER_BELOW

PEAK = 50e9


class FakeLink:
    """50 GB/s; a call costs each mover a fixed time, a row another, which only the first call of many adds in full."""

    movers: Sequence[str] = ("single", "batched", "gather")
    per_call: ClassVar = {"single": 0.0, "batched": 10e-6, "gather": 5e-6}
    per_row: ClassVar = {"single": 3e-6, "batched": 0.2e-6, "gather": 0.0}
    speed: ClassVar = {"single": 1.0, "batched": 1.0, "gather": 0.9}

    def __init__(self) -> None:
        self.moved: list[tuple[str, int, int, int]] = []

    def peak(self) -> tuple[int, float]:
        return 1 << 29, (1 << 29) / PEAK

    def move(self, mover: str, row_bytes: int, rows: int, calls: int) -> float:
        self.moved.append((mover, row_bytes, rows, calls))
        each = row_bytes * rows / PEAK / self.speed[mover] + self.per_row[mover] * rows
        return self.per_call[mover] + each * calls


def test_every_configuration_is_a_record_with_its_ratios() -> None:
    link, told = FakeLink(), list[str]()
    found = measure(link, 7, lambda: 1.0, told.append)
    assert found["peak_gb_per_s"] == 50.0
    assert (len(found["runs"]), len(told), found["skipped"]) == (7 * 4 * 3, 28, 0)
    (one,) = [
        run for run in found["runs"] if (run["row_bytes"], run["rows"], run["mover"]) == (MIB, 16, "batched")
    ]
    nbytes = 16 * MIB
    assert one["gb_per_s"] == pytest.approx(nbytes / (10e-6 + nbytes / PEAK + 3.2e-6) / 1e9, abs=0.01)
    assert one["ratio"] == pytest.approx(one["gb_per_s"] / 50, abs=0.001)
    assert one["ratio"] < one["steady_ratio"] < 1
    calls = {entry[3] for entry in link.moved if entry[1:3] == (MIB, 16)}
    assert calls == {1, round(transfers.STEADY_SECONDS / (nbytes / PEAK))}
    assert max(entry[3] for entry in link.moved) == transfers.STEADY_CALLS


def test_movers_alternate_and_the_peak_is_measured_between() -> None:
    link = FakeLink()
    measure(link, 7, lambda: 1.0, lambda line: None, sizes=(MIB,), counts=(4,))
    names = [entry[0] for entry in link.moved[3:]]
    assert names == ["single", "single", "batched", "batched", "gather", "gather"] * 7


def test_no_time_left_is_said() -> None:
    times = iter([1.0, 1.0, 0.0, -1.0])
    found = measure(
        FakeLink(), 7, lambda: next(times), lambda line: None, sizes=(MIB,), counts=(1, 4, 16, 64)
    )
    assert (len(found["runs"]), found["skipped"]) == (6, 6)
    assert found["goals"]["ratio"]["rows_of_64_kib_64"] is None


def runs(batched: dict[int, float], gather: dict[int, float]) -> list[dict[str, object]]:
    return [
        {"row_bytes": size, "rows": rows, "mover": name, "ratio": value * scale, "steady_ratio": value}
        for name, values in (("batched", batched), ("gather", gather))
        for size, value in values.items()
        for rows, scale in ((1, 0.1), (4, 0.9), (64, 1.0))
    ]


@pytest.mark.parametrize(
    ("batched", "gather", "below"),
    [
        ({1: 0.5, 2: 0.8, 3: 0.95}, {1: 0.8, 2: 0.85, 3: 0.9}, 3),
        ({1: 0.5, 2: 0.9, 3: 0.95}, {1: 0.8, 2: 0.85, 3: 0.9}, 2),
        ({1: 0.9, 2: 0.9, 3: 0.95}, {1: 0.8, 2: 0.85, 3: 0.9}, 0),
        ({1: 0.5, 2: 0.5, 3: 0.5}, {1: 0.8, 2: 0.85, 3: 0.9}, 4),
        ({1: 0.9, 2: 0.5, 3: 0.95}, {1: 0.8, 2: 0.85, 3: 0.9}, 3),
        ({1: 0.9}, {}, None),
    ],
)
def test_the_crossover_is_where_the_batch_stays_ahead(
    batched: dict[int, float], gather: dict[int, float], below: int | None
) -> None:
    assert crossover(runs(batched, gather), (1, 2, 3))["gather_below_bytes"] == below


def test_goals_take_the_best_mover_and_the_worst_size() -> None:
    found = measure(FakeLink(), 7, lambda: 1.0, lambda line: None)
    by_key = {(run["row_bytes"], run["rows"], run["mover"]): run["ratio"] for run in found["runs"]}
    wanted = goals(found["runs"])["ratio"]
    assert wanted["rows_of_64_kib_64"] == max(by_key[64 * KIB, 64, name] for name in FakeLink.movers)
    assert wanted["rows_from_1_mib_16_least"] == max(by_key[MIB, 16, name] for name in FakeLink.movers)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], []),
        (["--commit", "abc", "--repeats", "9"], ["--repeats", "9"]),
        (["--output=/tmp/x.json", "--pin-gib", "4", "--commit=abc"], ["--pin-gib", "4"]),
        (["--pin-gib", "4", "--output", "x.json"], ["--pin-gib", "4"]),
    ],
)
def test_the_command_of_a_result_is_what_changes_it(given: list[str], kept: list[str]) -> None:
    assert transfers._lasting(given) == kept


def test_a_tree_without_git_is_told_its_commit() -> None:
    assert provenance(["x"], at="abc")["commit"] == "abc"


@pytest.mark.parametrize("wrong", [["--repeats", "3"], ["--pin-gib", "1"]])
def test_too_little_to_measure_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        transfers._parse(wrong)


def test_the_constant_is_what_was_measured() -> None:
    if not transfers.RESULT.is_file():
        pytest.skip("not measured yet")
    measured = read_json(transfers.RESULT)["transfers"]["crossover"]["gather_below_bytes"]
    assert measured == GATHER_BELOW
