"""The bench of restarts, in small: what it counts, whatever it takes."""

from __future__ import annotations

from pathlib import Path

from bench import restart


def test_hit_rates() -> None:
    told: list[str] = []
    found = restart.measure_hits(12, 6, told.append)
    assert set(found["pools"]) == {"25%", "50%"}
    assert len(told) == 2
    for pool in found["pools"].values():
        rates = [value for name, value in pool.items() if name.endswith(("rate", "window"))]
        assert len(rates) == 4
        assert all(0.0 <= rate <= 1.0 for rate in rates)
        assert pool["warm_first_window"] >= pool["cold_first_window"], "an empty pool serves nothing at first"


def test_an_arena_is_read_once(tmp_path: Path) -> None:
    found = restart.measure_arena(0.03, 1, tmp_path, lambda text: None)
    assert found["rows"] == 4
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == {
        "read": 1,
        "found": 1,
        "found, not verified": 1,
    }
    assert not list(tmp_path.iterdir())
