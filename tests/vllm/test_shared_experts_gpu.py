"""Models with shared experts on a GPU: vLLM runs those on another stream, beside layers that fetch their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import Kind, write_checkpoint
from support.engines import BATCH, assert_identical, run_workloads
from ziggurat.integration.determinism.engine import Engine, open_engine
from ziggurat.residency.config import TiersConfig

LAYERS, EXPERTS = 5, 32
ROWS = (LAYERS - 1) * EXPERTS  # the first layer is dense
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE"}


@pytest.fixture(scope="module", params=["deepseek2", "deepseek3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """Rows of 3 MiB, so that a gather takes longer than a layer's shared experts."""
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    write_checkpoint(
        folder,
        kind,
        layers=LAYERS,
        experts=EXPERTS,
        hidden=1024,
        intermediate=512,
        tokenizer=demo_model,
    )
    return folder


@pytest.mark.gpu
def test_pools_of_any_size_give_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The heads of these small models are too small for the kernels of latent attention.
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    on_gpu = torch.cuda.is_available()
    tiers = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(tmp_path)},
                "host": {"size": "100%"},
                "device": {"size": "100%", "device": "auto" if on_gpu else "cpu"},
            },
            "codecs": {"base": "bf16"},
            "miss": {"mode": "inline"},
            "heat": {"path": None},
        }
    )
    # A prompt that comes again is to be computed again.
    options: dict[str, Any] = {"enable_prefix_caching": False}
    if on_gpu:
        options["compilation_config"] = GRAPHS
    with open_engine(model, tiers, {} if on_gpu else {"kernels": True}, **options) as engine:
        service = engine.service
        service.preheated()
        expected = run_workloads(engine)
        for slots in (ROWS // 2, ROWS // 4, EXPERTS - 8):
            service.resize(slots)
            fetched = _fetched(service)
            assert_identical(expected, run_workloads(engine))
            assert _fetched(service) > fetched
            assert service.metrics.value("ziggurat_replay_passes_total") == 0
        if on_gpu:
            _show_a_step(engine)


def _fetched(service: Any) -> int:
    service.collect()
    return int(service.metrics.value("ziggurat_inline_rows_total"))


def _show_a_step(engine: Engine) -> None:
    """Print when the kernels of a decode step ran, and on which streams: where shared experts run is vLLM's choice."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.run(BATCH, 4)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    last = max(at for at, event in enumerate(events) if "gather_missing" in event.name)
    shown = events[max(0, last - 40) : last + 20]
    for event in shown:
        start = event.time_range.start - shown[0].time_range.start
        print(f"{start:9.1f} +{event.device_time:7.1f} stream {event.device_resource_id} {event.name[:70]}")
