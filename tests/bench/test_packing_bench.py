"""The benchmark of packing runs every part, and its table shows what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import packing, tables


@pytest.mark.parametrize("runs", [["bf16:w2", "bf16:bf16"], ["fp8_block:fp4"]])
def test_a_small_run(tmp_path: Path, runs: list[str]) -> None:
    out = tmp_path / "packing.json"
    options = ["--gib", "0.001", "--side", "1", "--repeats", "1", "--tp", "2", "--device", "cpu"]
    chosen = [word for run in runs for word in ("--run", run)]
    assert packing.main([*options, *chosen, "--folder", str(tmp_path), "--output", str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out]
    result = json.loads(out.read_text())
    assert [f"{run['source']}:{run['codec']}" for run in result["runs"]] == runs
    for run in result["runs"]:
        assert run["source_bytes"] >= 2**20
        assert set(run["gb_per_s"]) == {"read", "quantize", "write", "copy", "pack"}
        alone = {part: run["seconds"][part][0] for part in ("read", "quantize", "write")}  # rounded
        assert alone[run["slowest"]] == max(alone.values())
        assert run["bound_mib"] > 0
    rendered = tables.render("<!-- results:begin packing -->\n<!-- results:end packing -->\n", tmp_path)
    for run in result["runs"]:
        assert f"| {run['source']} → `{run['codec']}`, " in rendered
        assert f" of {run['bound_mib']} MiB |\n" in rendered
