"""Routing recorded in a real engine, and the simulator on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.engines import BATCH, SINGLE
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.simulation.events import make_events
from ziggurat.residency.simulation.simulate import make_pool, run
from ziggurat.residency.simulation.trace import read_trace


def test_a_recorded_run_is_simulated_to_the_count(
    demo_model: Path, make_tiers: Callable[..., TiersConfig], tmp_path: Path
) -> None:
    from ziggurat.integration.determinism.engine import open_engine

    tiers = make_tiers(pool="25%", eviction="heat-weighted")
    with open_engine(demo_model, tiers, {"record_routing": str(tmp_path)}) as engine:
        engine.run([SINGLE], 12)
        engine.run(BATCH, 8)
        service = engine.service
    trace = read_trace(tmp_path / "routing.npz")
    assert (trace.layers, trace.experts, trace.top_k) == (6, 32, 4)
    assert trace.metadata["model"] == demo_model.name
    assert trace.batches is not None
    assert trace.prefill is not None
    assert np.diff(trace.batches).max() > 4, "prompts"
    assert trace.prefill.any()
    events = make_events(trace, 1)
    found = run(
        events, "heat-weighted", make_pool(events, "heat-weighted", 48, sharing="shared", atomic=False)
    ).all
    metric = service.metrics.value
    assert found.steps == sum(metric("ziggurat_steps_total", outcome) for outcome in ("clean", "exact"))
    assert found.pairs == metric("ziggurat_routed_pairs_total")
    assert found.hits == metric("ziggurat_hit_pairs_total")
    assert found.evictions == service.slots.evictions
    assert found.evictions > 0
