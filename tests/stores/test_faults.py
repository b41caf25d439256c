"""The fault-injecting wrapper: its rules, and switching them while it runs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ziggurat.stores.errors import ReaderError
from ziggurat.stores.readers.base import ReadDone, ReadJob
from ziggurat.stores.readers.faults import FaultyReader
from ziggurat.stores.readers.pread import PreadReader

ROW = 8192
ROWS = 6


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "file"
    path.write_bytes(os.urandom(ROW * ROWS))
    return path


class Session:
    """Reads all rows again and again; the tag is the row's number."""

    def __init__(self, file: Path, rules: Mapping[str, Any] | Path) -> None:
        self.content = file.read_bytes()
        self.reader = FaultyReader(PreadReader(file, threads=2), rules)
        self.arrived: list[int] = []

    def read(self, *rows: int) -> dict[int, tuple[ReadDone, bytes]]:
        jobs = {row: ReadJob(row * ROW, memoryview(bytearray(b"\xaa" * ROW)), row) for row in rows}
        ends = list(self.reader.read(jobs.values(), lambda job: self.arrived.append(job.tag)))
        assert sorted(end.tag for end in ends) == sorted(rows)
        return {end.tag: (end, jobs[end.tag].buffer.tobytes()) for end in ends}

    def outcome(self, *rows: int) -> str:
        """One letter a row: . good, e error, s short, f flipped."""
        letters = []
        for row, (end, raw) in sorted(self.read(*(rows or range(ROWS))).items()):
            whole = self.content[row * ROW : (row + 1) * ROW]
            if end.error is not None:
                assert raw == b"\xaa" * ROW
                letters.append("e")
            elif end.nbytes < ROW:
                assert raw == whole[: end.nbytes] + b"\xaa" * (ROW - end.nbytes)
                letters.append("s")
            else:
                wrong = int.from_bytes(raw) ^ int.from_bytes(whole)
                assert wrong.bit_count() <= 1
                letters.append("f" if wrong else ".")
        return "".join(letters)


@pytest.fixture
def sessions(file: Path) -> Iterator[Any]:
    opened: list[Session] = []

    def make(rules: Mapping[str, Any] | Path) -> Session:
        opened.append(Session(file, rules))
        return opened[-1]

    yield make
    for session in opened:
        session.reader.close()


def rule(kind: str, **entries: Any) -> dict[str, Any]:
    return {"rules": [{"kind": kind, **entries}]}


@pytest.mark.parametrize(
    ("rules", "outcomes"),
    [
        ({}, ["......", "......"]),
        (rule("error"), ["eeeeee", "eeeeee"]),
        (rule("error", tags=[2]), ["..e...", "..e..."]),
        (rule("error", tags=[2], times=1), ["..e...", "......"]),
        (rule("error", tags=[2, 4], times=3), ["..e.e.", "..e...", "......"]),
        (rule("error", tags=[2], after=1, times=1), ["......", "..e...", "......"]),
        (rule("short", tags=[0, 5]), ["s....s"]),
        (rule("flip", tags=[1], times=1), [".f....", "......"]),
        (rule("delay", seconds=0), ["......"]),
        (
            {"rules": [{"kind": "flip", "tags": [1]}, {"kind": "error", "tags": [1, 3], "times": 2}]},
            [".e.e..", ".f...."],
        ),
        (rule("error", probability=0.0), ["......"]),
        (rule("error", probability=1.0), ["eeeeee"]),
    ],
)
def test_rules(sessions: Any, rules: dict[str, Any], outcomes: list[str]) -> None:
    session = sessions(rules)
    assert [session.outcome() for _ in outcomes] == outcomes
    hits = sum(letter != "." for outcome in outcomes for letter in outcome)
    if rules and rules["rules"][0]["kind"] in ("error", "short"):
        assert session.reader.hits == hits


def test_errors_carry_the_wanted_number(sessions: Any) -> None:
    end, _ = sessions(rule("error", errno="ESTALE")).read(0)[0]
    assert end.error.errno == errno.ESTALE
    assert "injected" in str(end.error)


def test_a_chosen_bit_is_flipped_before_arrival_is_announced(file: Path) -> None:
    reader = FaultyReader(PreadReader(file), rule("flip", bit=8 * 100 + 3))
    buffer = memoryview(bytearray(ROW))
    at_arrival: list[bytes] = []
    list(reader.read([ReadJob(0, buffer, 0)], lambda job: at_arrival.append(job.buffer.tobytes())))
    reader.close()
    expected = bytearray(file.read_bytes()[:ROW])
    expected[100] ^= 1 << 3
    assert at_arrival == [bytes(expected)]


def test_arrival_is_announced_only_for_whole_rows(sessions: Any) -> None:
    session = sessions(
        {
            "rules": [
                {"kind": "error", "tags": [0]},
                {"kind": "short", "tags": [1]},
                {"kind": "flip", "tags": [2]},
            ]
        }
    )
    assert session.outcome(0, 1, 2, 3) == "esf."
    assert sorted(session.arrived) == [2, 3]


def test_short_rows_below_a_page_bring_nothing(file: Path) -> None:
    reader = FaultyReader(PreadReader(file), rule("short"))
    (end,) = reader.read([ReadJob(0, memoryview(bytearray(4096)), 3)])
    reader.close()
    assert (end.tag, end.nbytes, end.error) == (3, 0, None)


def test_chance_depends_on_seed_and_count_but_not_on_order(sessions: Any) -> None:
    def run(seed: int, order: list[int]) -> list[str]:
        session = sessions({"seed": seed, **rule("error", probability=0.5)})
        outcomes = []
        for _ in range(8):
            found = "".join("e" if end.error else "." for _, (end, _) in sorted(session.read(*order).items()))
            outcomes.append(found)
        return outcomes

    first = run(1, [0, 1, 2, 3, 4, 5])
    assert run(1, [5, 3, 1, 0, 2, 4]) == first
    assert run(2, [0, 1, 2, 3, 4, 5]) != first
    share = "".join(first).count("e") / 48
    assert 0.2 < share < 0.8


def test_rules_in_a_file_are_switched_while_running(sessions: Any, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"

    def switch(rules: dict[str, Any] | None) -> None:
        if rules is None:
            path.unlink()
            return
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(rules))
        aside.rename(path)

    session = sessions(path)
    assert session.outcome() == "......"
    switch(rule("error", tags=[1], times=1))
    assert session.outcome() == ".e...."
    assert session.outcome() == "......"
    switch(rule("error", tags=[1], times=1))  # a new version counts anew
    assert session.outcome() == ".e...."
    switch(rule("short", tags=[2]))
    assert session.outcome() == "..s..."
    switch(None)
    assert session.outcome() == "......"
    path.write_text("{")
    with pytest.raises(ReaderError, match=r"rules\.json: no fault rules"):
        session.outcome()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"rule": []}, "unknown entry 'rule'"),
        ({"rules": {}}, "rules must be a list"),
        ({"seed": "x"}, "seed a number"),
        ({"rules": [3]}, "kind must be one of"),
        (rule("explode"), "kind must be one of error, short, flip, delay"),
        (rule("error", tag=3), "unknown entry 'tag'"),
        (rule("error", errno="EFOO"), "errno 'EFOO'"),
        (rule("error", errno="__name__"), "errno '__name__'"),
        (rule("error", errno=5), "errno 5"),
        (rule("error", times=-1), "times is -1"),
        (rule("error", times=True), "times is True"),
        (rule("error", tags=3), "tags are 3"),
        (rule("error", probability="0.5"), "probability is '0.5'"),
        (rule("delay", seconds=-1), "seconds is -1"),
        ([], "not a mapping"),
    ],
)
def test_bad_rules_are_named(file: Path, rules: Any, says: str) -> None:
    reader = PreadReader(file)
    with pytest.raises(ReaderError, match=says):
        FaultyReader(reader, rules)
    reader.close()
