"""Traces add up by kernel, and overlapping activities count once as busy time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.serving_profile import profiler_arguments, summarize


def event(name: str, start: float, duration: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}


def test_a_trace_adds_up(tmp_path: Path) -> None:
    events = [
        event("void ns::gemm<float>(int)", 100.0, 10.0),
        event("void ns::gemm<half>(int)", 105.0, 10.0),  # beside the first
        event("Memcpy HtoD", 130.0, 2.0, "gpu_memcpy"),
        event("cudaLaunchKernel", 90.0, 1.0, "cuda_runtime"),
        {"ph": "i", "name": "mark"},
    ]
    with gzip.open(tmp_path / "worker.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    (tmp_path / "frontend.json").write_text(json.dumps({"traceEvents": []}))
    found = summarize(tmp_path, tokens=2)
    assert found["span_us"] == 16.0
    assert found["busy_us"] == 8.5
    assert found["activities"] == 1.5
    assert found["top"] == [
        {"name": "gemm", "us": 10.0, "count": 1.0},
        {"name": "Memcpy HtoD", "us": 1.0, "count": 0.5},
    ]


def test_traces_without_a_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 1, "cpu_op")]}))
    with pytest.raises(ValueError, match="no activity"):
        summarize(tmp_path, 1)


def test_the_profiler_writes_where_it_is_told(tmp_path: Path) -> None:
    option, text = profiler_arguments(tmp_path)
    assert option == "--profiler-config"
    assert json.loads(text)["torch_profiler_dir"] == str(tmp_path)
