"""A service under load with its metrics on a port: what an operator's tools look at, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from support.fake_moe import FakeModel, FakePacks, Passes
from support.server import free_port
from ziggurat.allocators.topology import Gpu, GpuSurvey, PcieLink
from ziggurat.integration.observability.endpoint import serve_metrics
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.budget import MachineLimits
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.describe import describe_link
from ziggurat.residency.factory import open_service
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import StepTokens
from ziggurat.residency.service import ExpertService


@contextmanager
def serving_tiers(packs: FakePacks, model: FakeModel) -> Iterator[str]:
    """Steps run until the end, with and without prompts, some of them replayed; yields the URL of the metrics."""
    metrics = TierMetrics()
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs.paths[0].parent), "readers": 2},
                "host": {"size": "50%"},
                "device": {"size": "50%"},
            },
            "codecs": {"base": packs.codec},
            "miss": {"mode": "replay"},
            "heat": {"path": None},
        }
    )
    machine = MachineLimits(memory_available=8 << 30)
    codec = get_codec(packs.codec)
    service = open_service(config, packs.geometry, packs.open(), codec, metrics=metrics, machine=machine)
    # There is no GPU here; its link is a part of the page all the same.
    gpu = Gpu(0, "a GPU", "GPU-0", "00000000:01:00.0", None, 1, 1, (9, 0), PcieLink(5, 16, 5, 16))
    describe_link(metrics, torch.device("cuda:0"), lambda: GpuSurvey((gpu,), "580", None))
    port = free_port()
    stop_serving = serve_metrics(metrics, 0, port)
    done = threading.Event()
    worker = threading.Thread(target=_run, args=(service, model, metrics, done))
    worker.start()
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        done.set()
        worker.join()
        stop_serving()
        service.close()


def _run(service: ExpertService, model: FakeModel, metrics: TierMetrics, done: threading.Event) -> None:
    run = Passes(model, service)
    prompt = np.array([True, True, True])
    step = 0
    while not done.wait(0.01):  # the tools that look at it need the processor, too
        step += 1
        tokens = StepTokens(3, prompt) if step % 8 == 0 else StepTokens(3)
        run.step(model.inputs(3, seed=step % 40), tokens)
        _guess(metrics)


def _guess(metrics: TierMetrics) -> None:
    """What a GPU would count that looks ahead: half of what it fetches is used."""
    with metrics.behind.writing():
        metrics.behind.add("ziggurat_inline_rows_total", 3)
        metrics.behind.add("ziggurat_lookahead_guessed_rows_total", 4)
        metrics.behind.add("ziggurat_lookahead_wanted_rows_total", 2)
        metrics.behind.add("ziggurat_lookahead_fetched_bytes_total", 4 << 15)
        metrics.behind.add("ziggurat_lookahead_used_bytes_total", 2 << 15)
