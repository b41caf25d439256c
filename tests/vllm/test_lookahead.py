"""Layers that look ahead in a whole engine, with the CPU as the device: the bits of the all-resident one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from support.engines import assert_identical, run_workloads
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.integration.vllm.lookahead import whole_graph
from ziggurat.residency import budget
from ziggurat.residency.budget_plan import Check
from ziggurat.residency.config import TiersConfig

TiersFactory = Callable[..., TiersConfig]
ON_DEVICE = {"kernels": True}


def test_the_routers_of_a_served_model_guess_its_misses(
    demo_model: Path, make_tiers: TiersFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plan is for a GPU or a CPU; here a CPU stands for a GPU.
    fits = Check("look-ahead", 1, 1, "support", "miss.lookahead", "")
    monkeypatch.setattr(budget, "lookahead_check", lambda *given, **options: fits)
    with open_engine(demo_model, make_tiers(pool="100%"), ON_DEVICE) as engine:
        expected = run_workloads(engine)
    tiers = make_tiers(pool="25%", arena="100%")
    tiers = tiers.model_copy(update={"miss": tiers.miss.model_copy(update={"lookahead": 4})})
    with open_engine(demo_model, tiers, ON_DEVICE) as engine:
        service = engine.service
        assert service.lookahead.possible
        service.preheated()
        assert_identical(expected, run_workloads(engine))
        counts = service.lookahead.counts()
        assert counts.guessed > 100
        # By chance 4 of 32 experts are routed to.
        assert counts.matched > counts.guessed * 0.4


@pytest.mark.parametrize(
    ("capturing", "mode", "allowed"),
    [
        (False, CUDAGraphMode.NONE, True),
        (False, CUDAGraphMode.PIECEWISE, True),
        (True, CUDAGraphMode.PIECEWISE, False),
        (True, CUDAGraphMode.FULL, True),
    ],
)
def test_only_graphs_of_the_whole_model_and_eager_code_look_ahead(
    capturing: bool, mode: CUDAGraphMode, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with override_forward_context(SimpleNamespace(cudagraph_runtime_mode=mode)):
        assert whole_graph(torch.device("cuda")) == allowed
        assert whole_graph(torch.device("cpu"))
