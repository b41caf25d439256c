"""The fault suite in short; README.md says how to run it in full. The seed differs each time and is printed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")


@pytest.mark.parametrize(
    ("suite", "count"),
    [("builds", 10), ("faulty-builds", 16), ("reads", 24), ("flips", 60), ("headers", 200), ("arenas", 24)],
)
def test_short(suite: str, count: int, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    command = [sys.executable, str(RUN), suite, "--count", str(count), "--seed", str(seed)]
    command += ["--output", str(tmp_path / "faults.json"), "--commit", "test", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
