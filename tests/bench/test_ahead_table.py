"""The table of steps with and without look-ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import tables

STEP: dict[str, Any] = {"missed_rows_per_step": 24.4, "limit_ratio": 1.984, "same_bits": True}
RESULT: dict[str, Any] = {
    "layers": 14,
    "experts": 256,
    "top_k": 6,
    "codec": "w2",
    "row_bytes": 6912 << 10,
    "dense_mb_per_layer": 150.0,
    "link_gb_per_s": 54.9,
    "command": "python bench/x.py",
    "commit": "0123456789abcdef",
    "date": "2026-01-02",
    "machine": {"gpu": "A GPU", "driver": "580.1", "torch": "2.11.0", "vllm": "0.24.0"},
    "lookahead": 6,
    "cases": [
        {
            "label": "mapped M=1",
            "recall": 0.593,
            "resident_ms": {"mean": 2.6},
            "runs": [
                {"coverage": 0.5, "inline": {**STEP, "step_ms": {"mean": 4.0}}},
                {
                    "coverage": 0.25,
                    "inline": {**STEP, "step_ms": {"mean": 6.24}},
                    "ahead": {
                        **STEP,
                        "step_ms": {"mean": 5.61},
                        "limit_ratio": 1.784,
                        "ahead": {
                            "guessed_rows_per_step": 30.0,
                            "recall_missing": 0.61,
                            "used_mib_per_step": 81.5,
                            "wasted_mib_per_step": 20.25,
                        },
                    },
                },
            ],
        }
    ],
}


def test_steps_with_and_without_look_ahead_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "inline_ahead.json").write_text(json.dumps(RESULT))
    name = "h200/inline_ahead"
    rendered = tables.render(f"<!-- results:begin {name} -->\n<!-- results:end {name} -->\n", tmp_path)
    gain = "| mapped M=1: 25% | 59% | 6.24 ms | 5.61 ms (-10%) | 1.984 | 1.784 | 24.4 | 30.0 | 61% |"
    assert f"{gain} 81.5 MiB | 20.2 MiB | same |" in rendered
    assert "50%" not in rendered
    assert "6 guesses a token" in rendered
