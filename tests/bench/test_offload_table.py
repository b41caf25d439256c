"""The table of tiers beside vLLM's offloaders, and ratios to two links."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from bench import tables
from support.table_pages import marked

LINKS: dict[str, Any] = {
    "link_gb_per_s": 50.0,
    "link_ms": 2.0,
    "ratio": 1.05,
    "ratio_to_best_link": 1.104,
    "limit_ratio": 1.5,
    "limit_ratio_to_best_link": 1.624,
    "same_bits": True,
}
STEP: dict[str, Any] = {
    **LINKS,
    "step_ms": {"mean": 6.0},
    "missed_rows_per_step": 20.0,
    "missed_mib_per_step": 135.0,
    "passes_per_step": 1.0,
}
STOCK: dict[str, Any] = {
    **LINKS,
    "coverage": 0.25,
    "graph": True,
    "gpu_share": 0.25,
    "moved_mib_per_step": 500.0,
}
RESULT: dict[str, Any] = {
    "layers": 16,
    "experts": 256,
    "top_k": 6,
    "hidden": 4096,
    "intermediate": 2048,
    "codec": "w2",
    "row_bytes": 6912 << 10,
    "dense_mb_per_layer": 150.0,
    "link_gb_per_s": 55.5,
    "slowest_link_gb_per_s": 48.6,
    "command": "python bench/x.py",
    "commit": "0123456789abcdef",
    "date": "2026-01-02",
    "machine": {"gpu": "A GPU", "driver": "580.1", "torch": "2.11.0", "vllm": "0.24.0"},
    "cases": [
        {
            "label": "mapped M=1",
            "resident_ms": {"mean": 3.0},
            "runs": [{"coverage": 0.25, "inline": STEP, "replay": {**STEP, "step_ms": {"mean": 9.0}}}],
            "stock": [
                {
                    **STOCK,
                    "offloader": "none",
                    "coverage": 1.0,
                    "setting": "",
                    "gpu_share": 1.0,
                    "offloaded_layers": 0,
                    "step_ms": {"mean": 2.9},
                    "moved_mib_per_step": 0.0,
                },
                {
                    **STOCK,
                    "offloader": "uva",
                    "setting": "--cpu-offload-gb 19.4",
                    "offloaded_layers": 12,
                    "step_ms": {"mean": 12.0},
                    "graph": False,
                },
                {
                    **STOCK,
                    "offloader": "prefetch",
                    "setting": "--offload-group-size 6 --offload-num-in-group 5",
                    "offloaded_layers": 13,
                    "step_ms": {"mean": 450.0},
                    "same_bits": False,
                },
            ],
        },
        {"label": "not reached"},
    ],
}


def rendered(name: str, result: dict[str, Any], folder: Path) -> str:
    (folder / "h200").mkdir()
    (folder / "h200" / f"{name}.json").write_text(json.dumps(result))
    return tables.render(marked(f"h200/{name}"), folder)


def test_offloaders_stand_beside_the_tiers(tmp_path: Path) -> None:
    found = rendered("offloaders", RESULT, tmp_path)
    ratios = "50.0 | 2.00 ms | 1.050 (1.104) | 1.500 (1.624)"
    assert "| mapped M=1: all resident | 100% | 3.00 ms | 1.00 |" in found
    assert "| mapped M=1: 100%, no offloader, without the tiers | 100% | 2.90 ms | 0.97 | 0.0 MiB |" in found
    assert f"| mapped M=1: 25%, inline | 25% | 6.00 ms | 2.00 | 135.0 MiB | {ratios} | same |" in found
    uva = f"vLLM's UVA offloader, eager | 25% | 12.00 ms | 4.00 | 500.0 MiB | {ratios} | same |"
    assert f"| mapped M=1: 25%, {uva}" in found
    assert f"450.00 ms | 150.00 | 500.0 MiB | {ratios} | DIFFERENT |" in found
    assert "25% `--cpu-offload-gb 19.4` (12 layers offloaded); 25% `--offload-group-size 6" in found
    assert "not reached" not in found


def test_decode_steps_have_ratios_to_two_links(tmp_path: Path) -> None:
    found = rendered("inline_full", RESULT, tmp_path)
    line = "135.0 MiB | 50.0 | 2.00 ms | 1.050 (1.104) | 1.500 (1.624) | 1.00 |"
    assert f"| mapped M=1: 25%, inline | 6.00 ms | 20.0 | {line}" in found
    assert "| missed | link, GB/s | on the link | ratio |" in found
    assert "the best sample of the whole run, 55.5 GB/s (the slowest: 48.6)." in found
    widths = {line.count("|") for line in found.splitlines() if line.startswith("|")}
    assert widths == {12}


def test_results_without_a_link_beside_each_run_have_their_table_too(tmp_path: Path) -> None:
    old = copy.deepcopy(RESULT)
    for run in old["cases"][0]["runs"][0].values():
        if isinstance(run, dict):
            for name in ("link_gb_per_s", "ratio_to_best_link", "limit_ratio_to_best_link"):
                del run[name]
    del old["slowest_link_gb_per_s"]
    found = rendered("inline_full", old, tmp_path)
    assert "| 135.0 MiB | 2.00 ms | 1.050 | 1.500 | 1.00 |" in found
    assert "Link: 55.5 GB/s, large copies" in found
