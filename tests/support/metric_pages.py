"""Pages of metrics whose numbers are known, and a server for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from ziggurat.integration.observability.collector import TierCollector
from ziggurat.residency.metric_specs import HOTTEST, MAX_LAYERS
from ziggurat.residency.metrics import TierMetrics

STRIDE = 1 << 20
TIERS_INFO = {
    "codec": "w2",
    "device": "cuda:0",
    "eviction": "lfu-decay",
    "host_eviction": "heat-weighted",
    "miss_mode": "auto",
    "lookahead": "0",
    "layers": "43",
    "experts": "256",
    "top_k": "6",
}
BUILD_INFO = {"version": "0.1.0", "python": "3.11", "torch": "2.11", "vllm": "0.24.0"}


def served_metrics(layers: int = 43) -> TierMetrics:
    """A server that has done nothing yet."""
    metrics = TierMetrics()
    tiers = {**TIERS_INFO, "layers": str(layers)}
    metrics.describe(range(3, layers + 3), {"ziggurat_tiers_info": tiers, "ziggurat_build_info": BUILD_INFO})
    metrics.set("ziggurat_row_stride_bytes", STRIDE)
    for tier, used, capacity, floor in (("pool", 2000, 2752, 256), ("arena", 100, 4000, 8)):
        metrics.set("ziggurat_tier_used_rows", used, tier)
        metrics.set("ziggurat_tier_capacity_rows", capacity, tier)
        metrics.set("ziggurat_tier_used_bytes", used * STRIDE, tier)
        metrics.set("ziggurat_tier_capacity_bytes", capacity * STRIDE, tier)
        metrics.set("ziggurat_tier_floor_rows", floor, tier)
    return metrics


def ten_steps(metrics: TierMetrics, layers: int = 43) -> None:
    """Ten steps of four tokens, of which six missed nothing; 40 rows were fetched, 30 of them from the arena
    and 8 for prompts."""
    metrics.add("ziggurat_steps_total", 6, "clean")
    metrics.add("ziggurat_steps_total", 3, "replayed")
    metrics.add("ziggurat_steps_total", 1, "exact")
    metrics.add("ziggurat_steps_without_miss_total", 6)
    metrics.add("ziggurat_passes_total", 15)
    metrics.add("ziggurat_tokens_total", 40, "decode")
    metrics.add("ziggurat_routed_pairs_total", 1000)
    metrics.add("ziggurat_hit_pairs_total", 960)
    metrics.add("ziggurat_missed_pairs_total", 40)
    for tier, hits, misses in (("pool", 960, 40), ("arena", 30, 10), ("pack", 10, 0)):
        metrics.add("ziggurat_tier_hits_total", hits, tier)
        metrics.add("ziggurat_tier_misses_total", misses, tier)
    for source, rows in (("arena", 30), ("pack", 10)):
        metrics.add("ziggurat_fetched_rows_total", rows, source, "pool")
        metrics.add("ziggurat_fetched_bytes_total", rows * STRIDE, source, "pool")
        metrics.observe("ziggurat_fetch_seconds", [0.0002] * rows, source)
    metrics.add("ziggurat_prompt_fetched_rows_total", 8)
    metrics.set("ziggurat_fetching_rows", 5)
    metrics.add("ziggurat_evictions_total", 40, "pool")
    metrics.observe("ziggurat_step_seconds", [0.02] * 10)
    for part, seconds in (("first_pass", 0.12), ("repeated_passes", 0.06), ("fetch", 0.02)):
        metrics.add_seconds("ziggurat_step_part_seconds_total", seconds, part)
    shown = min(layers, MAX_LAYERS)
    metrics.add_layers("ziggurat_layer_fetched_rows_total", np.arange(shown) % 2)
    metrics.set_layers("ziggurat_layer_pool_heat_ratio", np.linspace(0.2, 1.0, shown))
    metrics.set_layers("ziggurat_layer_hottest_tenth_ratio", np.linspace(0.6, 0.3, shown))
    metrics.set("ziggurat_pool_heat_ratio", 0.9)
    metrics.set("ziggurat_pool_heat_best_ratio", 0.95)
    for (name, _), share in zip(HOTTEST, (0.1, 0.3, 0.5, 0.8, 0.95), strict=True):
        metrics.set("ziggurat_heat_ratio", share, name)
    metrics.set("ziggurat_link_bytes_per_second", 63e9)


def page_text(metrics: TierMetrics, ranks: int = 1) -> str:
    """The page of a server whose ranks all counted the same, among metrics of others."""
    registry = CollectorRegistry()
    registry.register(TierCollector(lambda: {rank: metrics.samples() for rank in range(ranks)}))
    return f"vllm:num_requests_running 3.0\n{generate_latest(registry).decode()}# EOF\n"


@contextmanager
def http_pages(answer: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    """Serves `answer(path)`, a status and a text; yields host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
