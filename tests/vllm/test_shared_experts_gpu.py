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
    """Rows of 3 MiB, so that a gather takes longer than a layer's shared expert."""
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
def test_they_run_beside_gathers_and_change_no_bit(
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
            assert _foreign_beside_gathers(engine)


def _fetched(service: Any) -> int:
    service.collect()
    return int(service.metrics.value("ziggurat_inline_rows_total"))


def _foreign_beside_gathers(engine: Engine) -> list[str]:
    """Names of kernels of others that began while a gather ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.run(BATCH, 8)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if str(event.device_type).endswith("CUDA")]
    gathers = [event.time_range for event in events if "gather_missing" in event.name]
    ours = ("gather_missing", "route", "gate_up_", "down_", "combine_")
    found = [
        event.name
        for event in events
        if not any(name in event.name for name in ours)
        and any(gather.start < event.time_range.start < gather.end for gather in gathers)
    ]
    spent = sum(gather.end - gather.start for gather in gathers)
    print(
        f"{len(gathers)} gathers, {spent:.0f} us; beside them {len(found)} kernels: {sorted(set(found))[:8]}"
    )
    return found
