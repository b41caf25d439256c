"""A `/metrics` endpoint of a worker's own, for engines that run without vLLM's API server (`metrics.port`)."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from ziggurat.integration.observability.collector import TierCollector
from ziggurat.residency.metrics import TierMetrics

HOST = "127.0.0.1"


def serve_metrics(metrics: TierMetrics, rank: int, port: int) -> Callable[[], None]:
    """Serve on 127.0.0.1:(port + rank) until the returned function is called. OSError if the port is taken."""
    registry = CollectorRegistry()
    registry.register(TierCollector(lambda: {rank: metrics.samples()}))
    server, thread = start_http_server(port + rank, HOST, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
