"""`ziggurat replay` as its user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from ziggurat.residency.config import TiersConfig


def test_replay_command(demo_model: Path, make_tiers: Callable[..., TiersConfig], tmp_path: Path) -> None:
    config, prompts = tmp_path / "tiers.yaml", tmp_path / "prompts.txt"
    config.write_text(yaml.safe_dump(make_tiers().model_dump(mode="json")), encoding="utf-8")
    prompts.write_text("import os\n\nclass Reader:\n", encoding="utf-8")
    command = [sys.executable, "-m", "ziggurat.integration.cli.main", "replay", str(demo_model)]
    options = ["-c", str(config), "--prompts", str(prompts), "--pools", "25%", "--tokens", "3", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] is True
    cases = {line["case"] for line in report["results"]}
    assert {
        "100% resident",
        "pool 25%, inline",
        "pool 25%, replay",
        "pool 25%, inline, slot order 1",
    } <= cases
    assert all(line["steps"] >= 3 and line["problems"] == [] for line in report["results"])
