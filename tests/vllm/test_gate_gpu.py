"""The identity gate on a GPU, as far as two engine starts go; `bench/gate_h200.py` alone runs all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[2] / "bench" / "gate_h200.py"


@pytest.mark.gpu
def test_pools_of_any_size_under_captured_graphs(tmp_path: Path) -> None:
    command = [sys.executable, str(GATE), "full", "small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:]
    report = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))
    assert [part["passed"] for part in report["parts"]] == [True, True]
    assert all(len(part["runs"]) > 8 for part in report["parts"])
