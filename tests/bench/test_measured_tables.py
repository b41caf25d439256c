"""Tables of what was measured on a GPU, and of studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import tables
from support.table_pages import ORIGIN, marked

GPU_ORIGIN = {
    "command": "python bench/kernels.py",
    "commit": "0123456789abcdef",
    "date": "2026-01-02",
    "machine": {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "vllm": "0.24.0"},
}
KERNELS: dict[str, Any] = {
    "rates": {"read_tb_per_s": 4.1, "copy_tb_per_s": 4.3, "matmul_tflops": 780.0},
    "runs": [
        {"shape": "ds4", "kernel": "ziggurat w2", "tokens": 1, "us": 17.26, "of_floor": 0.601},
        {"shape": "ds4", "kernel": "ziggurat w2", "tokens": 8192, "us": 2345.6, "of_floor": 0.5},
        {"shape": "ds4", "kernel": "vLLM Marlin MXFP4", "tokens": 1, "us": 90.0, "of_floor": 0.2},
    ],
    **GPU_ORIGIN,
}
HARNESS: dict[str, Any] = {
    "runs": {
        "recorded w2 M=1": {
            "layers": 12,
            "experts": 64,
            "top_k": 6,
            "row_mib": 6.75,
            "routing": "a trace",
            "runs": [
                {
                    "coverage": coverage,
                    "step_ms": {"median": ms, "mean": ms},
                    "zero_miss_share": 0.5,
                    "missed_pairs_per_step": 1.0,
                    "passes_per_step": 1.5,
                    "mib_per_step": 6.75,
                    "link_ms_per_step": 0.128,
                    "same_bits": True,
                }
                for coverage, ms in ((1.0, 2.0), (0.25, 3.0))
            ],
            **GPU_ORIGIN,
        }
    }
}
SERVE: dict[str, Any] = {
    "loads": [{"streams": 1, "tokens": 8}, {"streams": 32, "tokens": 8}],
    "servers": {
        "stock": {
            "what": "stock vLLM",
            "expert_bytes_on_gpu": 37_748_736,
            "median_tokens_per_s": {"1": 700.0, "32": 13000.0},
            "ratio_to_stock": {"1": 1.0, "32": 1.0},
        },
        "tiers-25": {
            "what": "tiers, 25 %",
            "expert_bytes_on_gpu": 9_437_184,
            "median_tokens_per_s": {"1": 350.0, "32": 6500.0},
            "ratio_to_stock": {"1": 0.5, "32": 0.501},
            "tiers": {"steps": 10.0, "steps_without_miss": 4.0, "passes": 17.0},
        },
    },
    **GPU_ORIGIN,
}


TRANSFERS: dict[str, Any] = {
    "transfers": {
        "peak_gb_per_s": 55.31,
        "runs": [
            {
                "row_bytes": 65536,
                "rows": 64,
                "mover": mover,
                "gb_per_s": speed,
                "ratio": speed / 55.31,
                "steady_gb_per_s": 50.0,
                "steady_ratio": 0.9,
            }
            for mover, speed in (("batched", 30.9), ("gather", 46.4))
        ],
    },
    **GPU_ORIGIN,
}


GATE: dict[str, Any] = {
    "parts": [
        {
            "part": "full",
            "runs": [
                {
                    "case": "25 %",
                    "steps": 12,
                    "passes": 20,
                    "missed": 300,
                    "outcomes": {"clean": 4, "exact": 8},
                    "problems": problems,
                }
                for problems in ([], ["logits differ"])
            ],
        }
    ],
    **GPU_ORIGIN,
}
PROFILE: dict[str, Any] = {
    "kernel": {
        "name": "gate_up",
        "tokens": 8,
        "state": "as it is",
        "microseconds": 95.49,
        "dram_read_mb": 203.02,
        "instructions_per_scheduler": 1000,
        "issue_slots_busy": 0.66,
        "alu_pipe": 0.5,
        "fma_heavy_pipe": 0.4,
        "tensor_pipe_active": 0.2,
        "warps_per_scheduler": 3.7,
        "eligible_warps_per_scheduler": 1.5,
        "stall_cycles_per_instruction": {"not_selected": 1.23},
    },
    "trials": [{"change": "more warps", "tokens_1": 30.0, "tokens_8": 150.0}],
    **GPU_ORIGIN,
}


HOST_COST: dict[str, Any] = {
    "runs": [
        {"model": "demo", "setup": "all resident", "tokens": 32, "before": 4.25, "after": 3.1, "beside": 1.5}
    ],
    **GPU_ORIGIN,
}

INLINE: dict[str, Any] = {
    "layers": 43,
    "experts": 256,
    "top_k": 6,
    "hidden": 4096,
    "intermediate": 2048,
    "codec": "w2",
    "row_bytes": 6912 << 10,
    "dense_mb_per_layer": 0.0,
    "link_gb_per_s": 54.2,
    "cases": [
        {
            "label": "mapped M=1",
            "resident_ms": {"median": 2.0, "mean": 2.0},
            "resident_host_us": {"before": 12.1, "whole": 20.0},
            "forced": {
                "step_ms": {"mean": 2.06},
                "host_us": {"before": 14.9, "whole": 25.0},
                "overhead": 0.03,
                "same_bits": True,
            },
            "runs": [
                {
                    "coverage": 0.25,
                    "inline": {
                        "step_ms": {"mean": 10.0},
                        "missed_rows_per_step": 60.0,
                        "missed_mib_per_step": 405.0,
                        "link_ms": 7.835,
                        "ratio": 1.017,
                        "limit_ratio": 1.276,
                        "passes_per_step": 1.0,
                        "same_bits": True,
                    },
                    "replay": {
                        "step_ms": {"mean": 14.0},
                        "missed_rows_per_step": 60.0,
                        "missed_mib_per_step": 405.0,
                        "passes_per_step": 2.0,
                        "same_bits": False,
                    },
                    "predicted": {"step_ms": 10.5, "error": 0.05},
                }
            ],
        },
        {"label": "not reached"},
    ],
    "prompt": {
        "tokens": 8192,
        "coverage": 0.19,
        "resident_ms": 600.0,
        "streamed_ms": 1300.0,
        "streamed_gib": 58.8,
        "link_ms": 1165.0,
        "ratio": 1.116,
        "same_bits": True,
        "decode_hits": {"steps": 50, "before": 0.6, "after": 0.61, "after_without_prompt": 0.62},
    },
    "timeline": {
        "inline at 25%": {
            "routing": "mapped M=1",
            "kernels": [{"name": "gather_missing", "count": 43, "us": 8000.0}],
            "span_us": 9900.0,
            "idle_us": 100.0,
            "gather_us": 8000.0,
            "gather_alone_us": 7600.0,
            "first_layers": ["0.0 +5.0 route_small"],
        }
    },
    **GPU_ORIGIN,
}
CHURN: dict[str, Any] = {
    "layers": 6,
    "experts": 64,
    "row_kib": 432.0,
    "steps": 10000,
    "steps_with_other_bits": 0,
    "outcomes": {"inline": 9000, "replayed": 1000},
    "evicted_from_the_arena": 20000,
    "read_into_the_arena": 15000,
    "rows_fetched_by_the_device": 90000,
    "rows_missing_in_the_arena": 1500,
    **GPU_ORIGIN,
}
INLINE_GATHER: dict[str, Any] = {
    "runs": [
        {
            "row_bytes": 6912 << 10,
            "misses": 4,
            "tokens": 1,
            "layer_us": {"plain": 20.0, "present": 20.9, "missing": 580.0},
            "idle_overhead": 0.045,
            "gather_us": gather,
            "copying_us": gather,
            "gather_of_link": None if gather is None else 0.93,
            "added_of_link": 0.92,
            "ratio": 1.07,
        }
        for gather in (560.0, None)
    ],
    **GPU_ORIGIN,
}


PACKING: dict[str, Any] = {
    "runs": [
        {
            "source": "bf16",
            "codec": "w2",
            "source_bytes": 8 << 30,
            "device": "cuda:0",
            "lanes": 4,
            "processes": False,
            "gb_per_s": {"read": 1.5, "quantize": 9.0, "write": 8.0, "copy": 1.5, "pack": 1.4},
            "of_slowest": 0.933,
            "of_copy_or_quantize": 0.933,
            "peak_mib": 300,
            "bound_mib": 900,
        }
    ],
    **GPU_ORIGIN,
}


def test_gpu_tables(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    contents = {
        "kernels": KERNELS,
        "transfers": TRANSFERS,
        "harness": HARNESS,
        "serve": SERVE,
        "gate": GATE,
        "profile": PROFILE,
        "inline": INLINE,
        "inline_ahead": {**INLINE, "lookahead": 6},
        "inline_full": INLINE,
        "offloaders": INLINE,
        "inline_gather": INLINE_GATHER,
        "churn": CHURN,
        "host_cost": HOST_COST,
        "packing": PACKING,
    }
    for name, content in contents.items():
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps(content))
    rendered = tables.render("".join(marked(f"h200/{name}") for name in contents), tmp_path)
    assert set(contents) == set(tables.GPU_RENDERERS)
    rates = "1.50 GB/s | 9.00 GB/s | 8.00 GB/s | 1.50 GB/s | 1.40 GB/s"
    assert f"| bf16 → `w2`, 8.0 GiB | {rates} | 0.93 | 0.93 | 300 of 900 MiB |" in rendered
    assert "4 lanes in threads on cuda:0. " in rendered
    assert "| 64 x 64 KiB | 30.9 (0.56) | 46.4 (0.84) | 0.90 | 0.90 |" in rendered
    assert "| full: 25 % | 24 | 40 | 600 | 8 clean, 16 exact | no |" in rendered
    assert "| `gate_up`, 8 tokens, as it is |  |" in rendered
    assert "| cycles an instruction: not selected | 1.23 |" in rendered
    assert "| more warps | 30.0 us | 150.0 us |" in rendered
    assert "| layer | ziggurat w2 | vLLM Marlin MXFP4 |" in rendered
    assert "| ds4, 1 token | 17.3 (0.60) | 90.0 (0.20) |" in rendered
    assert "| ds4, 8192 tokens | 2346 (0.50) |  |" in rendered
    assert "NVIDIA H200, driver 580.1, torch 2.11.0, vLLM 0.24.0, commit `0123456789`" in rendered
    assert (
        "| recorded w2 M=1: 25% | 3.00 ms | 3.00 ms | 1.50 | 50% | 1.0 | 1.50 | 6.8 MiB | 0.13 ms | same |"
        in rendered
    )
    assert "| tiers, 25 % | 9.4 MB | 350 tok/s | 0.500 | 6500 tok/s | 0.501 | 40% | 1.70 |" in rendered
    assert "| stock vLLM | 37.7 MB | 700 tok/s | 1.000 | 13000 tok/s | 1.000 |  |  |" in rendered

    assert "of all resident and admitting: mapped M=1 12 and 15 us." in rendered
    assert "| mapped M=1: all resident, admitting | 2.06 ms |  |  |  | 1.030 |  |  |  | same |" in rendered
    ratios = "7.83 ms | 1.017 | 1.276 | 1.00 | 10.50 ms (+5%) | same |"
    assert f"| mapped M=1: 25%, inline | 10.00 ms | 60.0 | 405.0 MiB | {ratios}" in rendered
    assert (
        "| mapped M=1: 25%, replay | 14.00 ms | 60.0 | 405.0 MiB |  |  |  | 2.00 |  | DIFFERENT |" in rendered
    )
    assert "not reached" not in rendered
    assert "| ratio to the longer of work and link | 1.116 |" in rendered
    assert "| steps | 10000: 9000 inline, 1000 replayed |" in rendered
    assert "| only gathers run |  | 7600 us |" in rendered
    assert "```\n0.0 +5.0 route_small\n```" in rendered
    times = "20.0 us | 20.9 us (+4.5%) | 580.0 us"
    assert f"| 4 x 6.75 MiB, 1 token | {times} | 560.0 us | 0.93 | 0.92 | 1.070 |" in rendered
    assert f"| 4 x 6.75 MiB, 1 token | {times} |  |  | 0.92 | 1.070 |" in rendered


def test_servers_with_inline_misses_stand_beside_replay(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    servers = {name: dict(found) for name, found in SERVE["servers"].items()}
    first = next(iter(servers))
    servers[first]["ratio_to_replay"] = {"1": 2.5, "32": 1.25}
    (tmp_path / "h200" / "serve.json").write_text(json.dumps({**SERVE, "servers": servers}))
    rendered = tables.render(marked("h200/serve"), tmp_path)
    assert "| 1 stream | of stock | of replay | 32 streams | of stock | of replay |" in rendered
    assert "| 2.50 |" in rendered
    assert "| 1.25 |" in rendered


def test_studies_of_recorded_routing(tmp_path: Path) -> None:
    shares = {"device": 0.176, "lru": 0.2, "belady": 0.078}
    policy = {
        "rules": {"candidates": 32, "half_life": 256},
        "runs": [{"trace": "demo", "tokens": 8, "coverage": 0.5, "slots": 96, "missed_share": shares}],
        **ORIGIN,
    }
    guesses = {
        "tokens": 1,
        "coverage": 0.25,
        "moment": "MoE input",
        "guesses": 4,
        "recall": 0.755,
        "missing_per_layer": 1.7,
        "recall_missing": 0.684,
        "wrong_per_layer": 0.66,
        "layer_us": {"without": 300.0, "with": 315.0, "cancelled": 264.0, "perfect": 255.0, "limit": 237.0},
    }
    for name, content in {"admission_policy": policy, "lookahead": {"runs": [guesses], **ORIGIN}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    rendered = tables.render(marked("admission_policy") + marked("lookahead"), tmp_path)
    assert "| demo, 8 tokens, 50% | 96 | 17.6% | 20.0% | 7.8% |" in rendered
    assert "32 candidates, half-life of 256 steps" in rendered
    times = "300 us | 315 us (+5%) | 264 us (-12%) | 255 us (-15%) | 237 us |"
    assert f"| 1 token, 25%, MoE input, 4 guesses | 76% | 1.70 | 68% | 0.66 | {times}" in rendered


def test_what_a_step_costs_the_host(tmp_path: Path) -> None:
    (tmp_path / "host_cost.json").write_text(json.dumps({**HOST_COST, **ORIGIN}))
    rendered = tables.render(marked("host_cost"), tmp_path)
    assert "| demo, all resident, 32 tokens | 4.2 us | 3.1 us | 1.5 us |" in rendered


def test_what_no_gpu_was_measured_at_says_so(tmp_path: Path) -> None:
    assert "Not measured yet." in tables.render(marked("h200/serve"), tmp_path)
    with pytest.raises(tables.TableError, match="no table for 'h200/unknown'"):
        tables.render(marked("h200/unknown"), tmp_path)
