"""Tables of the README come from their sources, and a stale one is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import tables
from support.table_pages import ORIGIN, marked
from ziggurat.residency.metric_specs import METRICS

LOSS: dict[str, Any] = {
    "runs": {
        "demo": {
            "model": "demo",
            "dtype": "auto",
            "codecs": {
                "bf16": {"loss": 1.37321, "target": 1.373, "tolerance": 0.003, "ok": True},
                "w2": {"loss": 1.5376},
            },
            **ORIGIN,
        }
    }
}
SPEED: dict[str, Any] = {
    "packing": {
        "runs": [
            {
                "source": "bf16",
                "codec": "w2",
                "source_mb": 100.0,
                "mb_per_s": 123.4,
                "copy_mb_per_s": 1000.0,
                "cpu_s": {"pack": 1.25, "copy": 0.1},
            }
        ],
        **ORIGIN,
        "load": {"before": 0.5, "after": 1.25},
    },
    "decoding": {
        "streams": [1, 4],
        "runs": [
            {
                "what": "`bf16` rows, 25% resident",
                "tokens_per_s": {"1": 10.04, "4": 20.0},
                "cpu_ms_per_token": {"1": 99.0, "4": 50.04},
            }
        ],
        **ORIGIN,
    },
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "heldout_loss.json").write_text(json.dumps(LOSS))
    (tmp_path / "throughput.json").write_text(json.dumps(SPEED))
    return tmp_path


def test_results_replace_what_stands_between_the_markers(results: Path) -> None:
    rendered = tables.render(marked("heldout_loss"), results)
    assert rendered.startswith("above\n<!-- results:begin heldout_loss -->\n| checkpoint |")
    assert "| `demo`, bfloat16 activations | 1.3732 (1.373 ± 0.003) |  | 1.5376 |\n" in rendered
    assert "commit `0123456789`" in rendered
    assert "old" not in rendered
    assert rendered.endswith("<!-- results:end heldout_loss -->\nbelow\n")


def test_throughput_table(results: Path) -> None:
    rendered = tables.render(marked("throughput"), results)
    assert "| bf16 → `w2` | 123 MB/s | 1000 MB/s | 12.5 ms | 1.0 ms |\n" in rendered
    assert "| `bf16` rows, 25% resident | 10 tok/s | 20 tok/s | 99.0 ms | 50.0 ms |\n" in rendered
    assert "1 OpenMP thread(s), load 0.5 to 1.2, vLLM 0.32.0" in rendered


def test_rendering_twice_changes_nothing(results: Path) -> None:
    text = marked("heldout_loss") + marked("throughput") + "<!-- metrics:begin -->\n<!-- metrics:end -->\n"
    once = tables.render(text, results)
    assert tables.render(once, results) == once


def test_the_metrics_table_names_every_metric(results: Path) -> None:
    rendered = tables.render("<!-- metrics:begin -->\nstale\n<!-- metrics:end -->\n", results)
    assert all(f"| `{spec.name}` | {spec.kind} |" in rendered for spec in METRICS)
    assert "stale" not in rendered


def test_the_metrics_table_is_in_the_docs_and_has_every_metric() -> None:
    """A metric that is added, renamed or changed without `python bench/tables.py` fails here."""
    page = (tables.ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.count("<!-- metrics:begin -->") == 1
    rows = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `ziggurat_")]
    assert rows == [spec.name for spec in METRICS]
    assert tables.render(page) == page


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results:begin heldout_loss -->\n",
        "<!-- results:end heldout_loss -->\n",
        "<!-- results:begin heldout_loss -->\n<!-- results:end throughput -->\n",
        "<!-- metrics:begin -->\n",
        "<!-- metrics:begin-->\n<!-- metrics:end -->\n",
    ],
)
def test_a_marker_alone_is_an_error(results: Path, text: str) -> None:
    with pytest.raises(tables.TableError, match="without a partner"):
        tables.render(text, results)


def test_a_table_without_a_source_is_an_error(results: Path) -> None:
    with pytest.raises(tables.TableError, match="no table for 'unknown'"):
        tables.render(marked("unknown"), results)
    (results / "throughput.json").unlink()
    with pytest.raises(tables.TableError, match=r"throughput\.json"):
        tables.render(marked("throughput"), results)


def test_check_finds_a_stale_table(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- metrics:begin -->\n<!-- metrics:end -->\n")
    monkeypatch.setattr(tables, "PAGES", (readme,))
    assert tables.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert readme.read_text() == "<!-- metrics:begin -->\n<!-- metrics:end -->\n"
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0


def test_the_pages_are_up_to_date() -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        marks = ("<!-- results:begin ", "<!-- metrics:begin -->", "<!-- sizing:begin -->")
        assert any(mark in text for mark in marks)
        assert tables.render(text) == text
