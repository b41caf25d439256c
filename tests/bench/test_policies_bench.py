"""The benchmark of policies, at a size that takes a moment, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tables
from bench.policies import host, run
from bench.policies import tables as policy_tables
from bench.results_io import read_json
from ziggurat.residency.policies.registry import policy_names
from ziggurat.residency.simulation.host import simulated_host_names
from ziggurat.residency.simulation.simulate import simulated_names


def test_every_policy_is_classical_ours_the_devices_or_the_bound() -> None:
    assert {*policy_tables.CLASSICAL, *policy_tables.OURS} == set(policy_names())
    assert {*policy_tables.CLASSICAL, *policy_tables.OURS, "device", policy_tables.BOUND} == set(
        simulated_names()
    )


def test_the_gap_is_between_the_best_classical_policy_and_the_bound() -> None:
    rows = dict.fromkeys(policy_tables.CLASSICAL, 9.0) | {"lru": 8.0, "next-use": 7.0, "belady": 4.0}
    cell = {"policies": {name: {"rows": count} for name, count in rows.items()}}
    assert policy_tables.closed(cell, "next-use") == 25.0
    assert policy_tables.closed(cell, "arc") == -25.0


def test_parts_are_measured_and_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "COVERAGES", (10.0, 25.0, 50.0))
    monkeypatch.setattr(run, "BATCHES", (1, 2))
    monkeypatch.setattr(host, "POOLS", (25.0,))
    arguments = ["--results", str(tmp_path), "--sequences", "2", "--commit", "0123456789abcdef"]
    assert run.main([*arguments, "--parts", "grid"]) == 0
    assert run.main([*arguments, "--parts", "device", "prompts", "host", "scans"]) == 0
    found = read_json(tmp_path / "policies.json")
    parts = {"grid", "pairs_per_second", "device", "prompts", "host", "host_scans"}
    assert set(found["origins"]) == parts
    for line in found["host"]:
        read = {name: numbers["read"] for name, numbers in line["arenas"].items()}
        assert min(read.values()) == read["belady"] <= line["asked"]
    assert {cell["role"] for cell in found["grid"]} == {"train", "test"}
    for cell in found["grid"]:
        rows = {name: numbers["rows"] for name, numbers in cell["policies"].items()}
        assert min(rows.values()) == rows["belady"]
    page = tables.render("<!-- results:begin policies -->\n<!-- results:end policies -->\n", tmp_path)
    for name in simulated_names():
        assert f"`{name}`" in page
    for name in (*simulated_host_names(), "lru by layer, floor 50%"):
        assert f"`{name}`" in page
    assert "prompts displace nothing" in page
    assert "commit `0123456789`" in page
