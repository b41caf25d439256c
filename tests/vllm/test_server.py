"""The served product over HTTP: answers, metrics, and a disk that fails in the middle of serving."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.engines import BATCH, LONG, SINGLE
from support.server import Server, serving
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.metric_specs import METRICS

TiersFactory = Callable[..., TiersConfig]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "rules.json"


@pytest.fixture(scope="module")
def server(
    demo_model: Path, make_tiers: TiersFactory, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    # Without an arena every miss is a read, so that a fault meets the next request.
    tiers = make_tiers(pool="25%", arena="0", disk={"faults": str(faults), "rebuild": False})
    config = tmp_path_factory.mktemp("config") / "tiers.yaml"
    config.write_text(yaml.safe_dump(tiers.model_dump(mode="json")), encoding="utf-8")
    with serving(demo_model, config) as running:
        yield running


def scrape(server: Server) -> Samples:
    status, text = server.get("/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ziggurat_")
    }


def total(samples: Samples, name: str) -> float:
    return sum(value for (found, _), value in samples.items() if found == name)


def test_answers_and_metrics(server: Server) -> None:
    before = scrape(server)
    replies: list[tuple[int, dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda p=prompt: replies.append(server.complete(p, 6))) for prompt in BATCH
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replies.append(server.complete(LONG, 3))
    assert [status for status, _ in replies] == [200] * 5, replies
    after = scrape(server)
    for spec in METRICS:
        if spec.name == "ziggurat_link_bytes_per_second":
            continue  # there is no link without a GPU
        exported = f"{spec.name}_count" if spec.kind == "histogram" else spec.name
        assert any(name == exported for name, _ in after), f"{spec.name} is not on /metrics"
    for samples in (before, after):
        hits, misses = (
            total(samples, "ziggurat_hit_pairs_total"),
            total(samples, "ziggurat_missed_pairs_total"),
        )
        assert hits + misses == total(samples, "ziggurat_routed_pairs_total")
        rows, moved = (
            total(samples, "ziggurat_fetched_rows_total"),
            total(samples, "ziggurat_fetched_bytes_total"),
        )
        assert moved == rows * total(samples, "ziggurat_row_stride_bytes")
    assert total(after, "ziggurat_routed_pairs_total") > total(before, "ziggurat_routed_pairs_total")


def test_a_failing_read_fails_its_requests_only(server: Server, faults: Path) -> None:
    status, healthy = server.complete(SINGLE, 6)
    assert status == 200
    faults.write_text(json.dumps({"rules": [{"kind": "error"}]}), encoding="utf-8")
    try:
        status, broken = server.complete("class Zebra(Animal):\n    def stripes", 6)
        assert status == 500, broken
        assert "expert" in json.dumps(broken)
        assert "layer" in json.dumps(broken)
        status, stream = server.post(
            "/v1/completions",
            {
                "model": "demo",
                "prompt": "import zlib, wave",
                "max_tokens": 4,
                "stream": True,
                "temperature": 0,
            },
        )
        assert status in (200, 500)
        assert "expert" in stream, stream
    finally:
        faults.unlink()
    errors = total(scrape(server), "ziggurat_io_errors_total")
    assert errors > 0
    status, again = server.complete(SINGLE, 6)
    assert status == 200
    assert again["choices"][0]["text"] == healthy["choices"][0]["text"]
    # The same prompt as the failed one must be computed anew: its spoiled KV blocks may not come from the prefix cache.
    status, retried = server.complete("class Zebra(Animal):\n    def stripes", 6)
    assert status == 200
    status, fresh = server.complete("class Zebra(Animal):\n    def stripes", 6, cache_salt="computed anew")
    assert status == 200
    assert retried["choices"][0]["text"] == fresh["choices"][0]["text"]
    assert total(scrape(server), "ziggurat_io_errors_total") == errors
