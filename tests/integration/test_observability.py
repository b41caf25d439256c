"""Worker counters reach a scrape in another process, whole and under the right names."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ziggurat.integration.observability.collector import TierCollector
from ziggurat.integration.observability.endpoint import serve_metrics
from ziggurat.integration.observability.shared import SharedBuffer, read_instance, sweep
from ziggurat.residency.metric_specs import METRICS
from ziggurat.residency.metrics import TierMetrics


def scrape(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> TierMetrics:
    written = TierMetrics()
    build = {"version": "1", "python": "3", "torch": "2", "vllm": 'a "b"'}
    written.describe((3, 5), {"ziggurat_build_info": build})
    with written.writing():
        written.add("ziggurat_routed_pairs_total", 12)
        written.add("ziggurat_fetched_bytes_total", 8192, "arena", "pool")
        written.set("ziggurat_coverage_ratio", 0.25)
        written.observe("ziggurat_fetch_seconds", [0.0004, 9.0], "pack")
    return written


def test_every_metric_is_exported(metrics: TierMetrics) -> None:
    registry = CollectorRegistry()
    registry.register(TierCollector(lambda: {0: metrics.samples(), 1: metrics.samples()}))
    seen = scrape(generate_latest(registry).decode())
    names = {name for name, _ in seen}
    for spec in METRICS:
        if spec.optional or spec.name == "ziggurat_tiers_info":
            assert spec.name not in names
            continue
        expected = f"{spec.name}_bucket" if spec.kind == "histogram" else spec.name
        assert expected in names
    rank = ("rank", "1")
    assert seen["ziggurat_routed_pairs_total", frozenset([rank])] == 12
    labels = frozenset([rank, ("source", "arena"), ("target", "pool")])
    assert seen["ziggurat_fetched_bytes_total", labels] == 8192
    assert seen["ziggurat_coverage_ratio", frozenset([rank])] == 0.25
    build = frozenset([rank, ("version", "1"), ("python", "3"), ("torch", "2"), ("vllm", 'a "b"')])
    assert seen["ziggurat_build_info", build] == 1
    assert seen["ziggurat_layer_fetched_rows_total", frozenset([rank, ("layer", "5")])] == 0
    pack = ("source", "pack")
    assert seen["ziggurat_fetch_seconds_count", frozenset([rank, pack])] == 2
    assert seen["ziggurat_fetch_seconds_bucket", frozenset([rank, pack, ("le", "0.0005")])] == 1
    assert seen["ziggurat_fetch_seconds_sum", frozenset([rank, pack])] == pytest.approx(9.0004)


def test_names_follow_prometheus_conventions() -> None:
    for spec in METRICS:
        assert spec.name.startswith("ziggurat_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.help


def test_a_scrape_of_a_large_model_has_the_lines_that_the_table_promises(metrics: TierMetrics) -> None:
    metrics.describe(range(61), {})
    registry = CollectorRegistry()
    registry.register(TierCollector(lambda: {rank: metrics.samples() for rank in range(4)}))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    absent = sum(spec.series(61) for spec in METRICS if spec.optional or spec.kind == "info")
    assert len(lines) == 4 * (sum(spec.series(61) for spec in METRICS) - absent)
    assert len(lines) == len({line.rpartition(" ")[0] for line in lines})


def test_another_process_reads_the_buffer(tmp_path: Path) -> None:
    buffer = SharedBuffer("engine-1", 3, tmp_path)
    metrics = TierMetrics(buffer.view)
    with metrics.writing():
        metrics.add("ziggurat_routed_pairs_total", 7)
    code = (
        "import sys; from pathlib import Path;"
        "from ziggurat.integration.observability.shared import read_instance;"
        "r = read_instance('engine-1', Path(sys.argv[1]));"
        "print({k: [s.value for s in v if s.spec.name == 'ziggurat_routed_pairs_total'] for k, v in r.items()})"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert out.stdout.strip() == "{3: [7.0]}"
    assert read_instance("engine-2", tmp_path) == {}
    buffer.close()
    assert read_instance("engine-1", tmp_path) == {}


def test_files_of_dead_writers_are_swept(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    stale = tmp_path / f"ziggurat.old.0.{child.pid}.metrics"
    alive = tmp_path / f"ziggurat.new.0.{os.getpid()}.metrics"
    other = tmp_path / "something.else"
    for path in (stale, alive, other):
        path.write_bytes(b"")
    sweep(tmp_path)
    assert not stale.exists()
    assert alive.exists()
    assert other.exists()
    assert read_instance("new", tmp_path) == {}


def test_own_endpoint(metrics: TierMetrics) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = serve_metrics(metrics, 0, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            seen = scrape(reply.read().decode())
    finally:
        stop()
    assert seen["ziggurat_routed_pairs_total", frozenset([("rank", "0")])] == 12
