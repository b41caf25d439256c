"""Heat decays by steps, and its file survives crashes, strangers and empty boots."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from ziggurat.residency.heat import HeatKey, HeatMap, load_heat, save_heat

LAYERS, EXPERTS = 2, 5
KEY = HeatKey("ab" * 32, "w2", "v1", LAYERS, EXPERTS, 64, 32)


def warm(*known: tuple[int, int, float]) -> HeatMap:
    heat = HeatMap(LAYERS, EXPERTS)
    for layer, expert, count in known:
        heat.counts[layer, expert] = count
    return heat


FULL = [(layer, expert, 1.0 + expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def test_counts_halve_in_a_half_life_of_steps() -> None:
    heat = HeatMap(LAYERS, EXPERTS, half_life=10)
    heat.add(1, np.array([0, 3]), np.array([8, 2]))
    for _ in range(10):
        heat.advance()
    assert heat.counts[1].tolist() == pytest.approx([4, 0, 0, 1, 0])
    assert heat.counts.dtype == np.float64


def test_order_is_hottest_first_and_deterministic() -> None:
    heat = warm((0, 1, 2.0), (1, 0, 5.0), (0, 3, 2.0), (1, 4, 0.5))
    assert heat.order() == [(5, 5.0), (1, 2.0), (3, 2.0), (9, 0.5)]


@settings(max_examples=50, deadline=None)
@given(
    counts=hnp.arrays(np.float64, (LAYERS, EXPERTS), elements=st.floats(0, 1e6)),
    rows=st.integers(0, LAYERS * EXPERTS),
)
def test_no_choice_of_rows_beats_the_top_share(counts: np.typing.NDArray[np.float64], rows: int) -> None:
    heat = HeatMap(LAYERS, EXPERTS)
    heat.counts[:] = counts
    chosen = np.zeros(LAYERS * EXPERTS, dtype=np.bool_)
    chosen[:rows] = True
    share = heat.share(chosen.reshape(LAYERS, EXPERTS))
    assert 0.0 <= share <= heat.top_share(rows) * (1 + 1e-12) + 1e-12
    assert heat.top_share(rows) <= 1.0 + 1e-12


def test_a_file_brings_back_every_bit(tmp_path: Path) -> None:
    path = tmp_path / KEY.filename(0, 1)
    heat = warm((0, 1, 1 / 3), (1, 4, 2e-3))
    assert save_heat(path, KEY, heat).done
    other = HeatMap(LAYERS, EXPERTS)
    note = load_heat(path, KEY, other)
    assert note.done
    assert "2 experts" in note.reason
    assert np.array_equal(other.counts, heat.counts)
    assert list(tmp_path.iterdir()) == [path], "no temporary file stays behind"


def test_names_differ_by_codec_model_and_rank() -> None:
    names = {
        KEY.filename(0, 1),
        KEY.filename(0, 2),
        KEY.filename(1, 2),
        dataclasses.replace(KEY, codec="fp4").filename(0, 1),
        dataclasses.replace(KEY, identity="cd" * 32).filename(0, 1),
    }
    assert len(names) == 5


@pytest.mark.parametrize(
    ("change", "value"),
    [("identity", "x"), ("codec", "fp4"), ("codec_version", "v2"), ("layers", 3), ("hidden", 128)],
)
def test_heat_of_something_else_is_ignored_with_a_reason(tmp_path: Path, change: str, value: object) -> None:
    path = tmp_path / "heat"
    save_heat(path, KEY, warm(*FULL))
    heat = HeatMap(LAYERS, EXPERTS)
    note = load_heat(path, dataclasses.replace(KEY, **{change: value}), heat)  # type: ignore[arg-type]  # by name
    assert not note.done
    assert "another model" in note.reason
    assert heat.known() == 0
    assert not heat.seeded


def corrupt(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "empty":
        data = bytearray()
    elif how == "truncated":
        data = data[: len(data) // 2]
    elif how == "garbage":
        data[:] = b"\xff" * len(data)
    elif how == "nan":
        data[-8:] = np.array([np.nan]).tobytes()
    elif how == "negative":
        data[-8:] = np.array([-1.0]).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["empty", "truncated", "garbage", "nan", "negative"])
def test_a_damaged_file_is_ignored_with_a_reason_and_replaced_later(tmp_path: Path, how: str) -> None:
    path = tmp_path / "heat"
    save_heat(path, KEY, warm(*FULL))
    corrupt(path, how)
    heat = HeatMap(LAYERS, EXPERTS)
    note = load_heat(path, KEY, heat)
    assert not note.done
    assert "damaged" in note.reason
    assert heat.known() == 0
    assert save_heat(path, KEY, warm((0, 0, 1.0))).done
    assert load_heat(path, KEY, heat).done


def test_another_shape_or_version_is_ignored(tmp_path: Path) -> None:
    import json

    path = tmp_path / "heat"
    key = json.dumps(dataclasses.asdict(KEY), sort_keys=True)
    heat = HeatMap(LAYERS, EXPERTS)
    save_file({"heat": np.ones((1, 1))}, path, {"version": "1", "key": key})
    assert "damaged" in load_heat(path, KEY, heat).reason
    save_file({"heat": np.ones((LAYERS, EXPERTS))}, path, {"version": "9", "key": key})
    assert "version 9" in load_heat(path, KEY, heat).reason
    save_file({"other": np.ones((LAYERS, EXPERTS))}, path, {"version": "1", "key": key})
    assert "damaged" in load_heat(path, KEY, heat).reason


def test_no_file_is_no_error(tmp_path: Path) -> None:
    note = load_heat(tmp_path / "none", KEY, HeatMap(LAYERS, EXPERTS))
    assert not note.done
    assert "no heat file" in note.reason


def test_an_empty_boot_does_not_overwrite_a_fuller_file(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    save_heat(path, KEY, warm(*FULL))
    before = path.read_bytes()
    for heat in (HeatMap(LAYERS, EXPERTS), warm((0, 0, 100.0))):
        note = save_heat(path, KEY, heat)
        assert not note.done
        assert note.reason
        assert path.read_bytes() == before


def test_a_run_that_continues_the_file_or_knows_more_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    save_heat(path, KEY, warm(*FULL[:6]))
    continued = HeatMap(LAYERS, EXPERTS)
    load_heat(path, KEY, continued)
    continued.counts[:] = 0.0
    continued.counts[0, 0] = 3.0
    assert save_heat(path, KEY, continued).done
    assert save_heat(path, KEY, warm(*FULL)).done


def test_a_folder_that_cannot_be_written_is_a_reason_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    note = save_heat(tmp_path / "file" / "heat", KEY, warm(*FULL))
    assert (note.done, note.problem) == (False, True)
    assert "cannot be written" in note.reason


def test_the_folder_is_made(tmp_path: Path) -> None:
    assert save_heat(tmp_path / "new" / "folder" / "heat", KEY, warm(*FULL)).done


def test_a_crash_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heat"
    save_heat(path, KEY, warm(*FULL[:3]))
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    note = save_heat(path, KEY, warm(*FULL))
    assert "No space left" in note.reason
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_several_steps_at_once_are_such_steps_one_by_one() -> None:
    """Each as its part of all of them; of others as far apart as the order of steps can make them."""
    pairs = np.repeat(np.random.default_rng(3).integers(0, 5, (1, 2, 6)), 7, axis=0)
    one, other = HeatMap(2, 6, half_life=4.0), HeatMap(2, 6, half_life=4.0)
    for heat in (one, other):
        heat.add(1, np.array([2, 3]), np.array([8, 1]))
    for step in pairs:
        for layer in range(2):
            one.add(layer, np.arange(6), step[layer])
        one.advance()
    other.add_steps(pairs.sum(axis=0), 7)
    assert np.allclose(one.counts, other.counts, rtol=1e-12)
    copy = other.copy()
    other.advance()
    assert np.allclose(one.counts, copy.counts, rtol=1e-12)
    for first in (True, False):
        late = HeatMap(1, 1, half_life=4.0)
        late.add_steps(np.array([[6]]), 3)
        apart = HeatMap(1, 1, half_life=4.0)
        for step in range(3):
            if step == (0 if first else 2):
                apart.add(0, np.array([0]), np.array([6]))
            apart.advance()
        assert 2 ** (-3 / 4) <= float(late.counts[0, 0] / apart.counts[0, 0]) <= 2 ** (3 / 4)
