"""Layers that fetch their own rows, in a whole engine with the CPU as the device: the bits of the all-resident one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import assert_identical, run_workloads
from ziggurat.integration.determinism.compare import Outcome
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.residency.config import TiersConfig

TiersFactory = Callable[..., TiersConfig]
ON_DEVICE = {"kernels": True}


@pytest.fixture(scope="module")
def expected(demo_model: Path, make_tiers: TiersFactory) -> dict[str, Outcome]:
    """Answers of the all-resident engine; replay mode is compared with them, too, in test_identity."""
    with open_engine(demo_model, make_tiers(pool="100%"), ON_DEVICE) as engine:
        assert engine.service.choice.serving == "replay"
        return run_workloads(engine)


# 20 rows are fewer than one layer's 32 experts.
@pytest.mark.parametrize("pool", ["50%", "25%", "19%", "20 rows"])
def test_with_every_row_in_the_arena_nothing_is_replayed(
    demo_model: Path, make_tiers: TiersFactory, expected: dict[str, Outcome], pool: str
) -> None:
    with open_engine(demo_model, make_tiers(pool=pool, arena="100%"), ON_DEVICE) as engine:
        service = engine.service
        service.preheated()
        assert service.choice.serving == "inline"
        assert_identical(expected, run_workloads(engine))
        service.collect()
        value = service.metrics.value
        assert value("ziggurat_replay_passes_total") == 0
        assert value("ziggurat_arena_misses_total") == 0
        assert value("ziggurat_steps_total", "streamed") > 0, "prompts"
        assert value("ziggurat_inline_rows_total") > 0
        service.slots.check()


@pytest.mark.parametrize(
    ("pool", "arena", "mode"), [("25%", "60 rows", "auto"), ("100%", "40 rows", "inline")]
)
def test_a_small_arena(
    demo_model: Path,
    make_tiers: TiersFactory,
    expected: dict[str, Outcome],
    pool: str,
    arena: str,
    mode: str,
) -> None:
    tiers = make_tiers(pool=pool, arena=arena, mode=mode)
    with open_engine(demo_model, tiers, {**ON_DEVICE, "shuffle_slots": 3}) as engine:
        service = engine.service
        assert service.choice.serving == "inline"
        if pool == "100%":  # as in the identity gate: one engine, pools of several sizes
            service.resize(48, slot_seed=1)
        assert_identical(expected, run_workloads(engine))
        assert service.metrics.value("ziggurat_arena_misses_total") > 0
        assert service.metrics.value("ziggurat_replay_passes_total") > 0
