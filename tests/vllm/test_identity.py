"""Whatever the pool, the miss mode and the slot order: the logits are those of the all-resident engine, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import write_checkpoint
from support.engines import LONG, assert_identical, run_workloads
from ziggurat.integration.determinism.compare import Outcome, differences
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.residency.config import TiersConfig

TiersFactory = Callable[..., TiersConfig]
Reference = Callable[[Path, str], dict[str, Outcome]]

KINDS = ("qwen3", "olmoe", "mixtral", "deepseek2", "deepseek3")
MODES: dict[str, dict[str, Any]] = {
    "inline": {"mode": "inline"},
    "replay-0": {"mode": "replay", "max_replays": 0},
    "replay-1": {"mode": "replay", "max_replays": 1},
    "replay-3": {"mode": "replay", "max_replays": 3},
}


@pytest.fixture(scope="module")
def reference(make_tiers: TiersFactory) -> Reference:
    """Answers of the all-resident engine, once per model and codec."""
    known: dict[tuple[Path, str], dict[str, Outcome]] = {}

    def answers(model: Path, codec: str) -> dict[str, Outcome]:
        if (model, codec) not in known:
            with open_engine(model, make_tiers(pool="100%", codec=codec)) as engine:
                known[model, codec] = run_workloads(engine)
                assert engine.service.metrics.value("ziggurat_missed_pairs_total") == 0
        return known[model, codec]

    return answers


@pytest.fixture(scope="module", params=KINDS)
def strong_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_model: Path
) -> Path:
    """A tiny checkpoint whose experts weigh enough that a missing one changes the routing behind it."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, kind=request.param, tokenizer=demo_model)
    return folder


# 5 rows are one more than a token's top-k of 4.
@pytest.mark.parametrize("pool", ["100%", "50%", "25%", "5 rows", "1 rows"])
@pytest.mark.parametrize("mode", MODES)
def test_demo_model(
    demo_model: Path, make_tiers: TiersFactory, reference: Reference, pool: str, mode: str
) -> None:
    expected = reference(demo_model, "bf16")
    with open_engine(demo_model, make_tiers(pool=pool, **MODES[mode])) as engine:
        assert_identical(expected, run_workloads(engine))


def test_auto_is_inline_on_the_cpu(demo_model: Path, make_tiers: TiersFactory, reference: Reference) -> None:
    expected = reference(demo_model, "bf16")
    with open_engine(demo_model, make_tiers(pool="25%", mode="auto")) as engine:
        assert engine.service.mode.value == "inline"
        assert_identical(expected, run_workloads(engine))
        assert engine.service.metrics.value("ziggurat_replay_passes_total") == 0


@pytest.mark.parametrize(
    ("pool", "mode"),
    [
        ("100%", "replay-1"),
        ("25%", "replay-3"),
        ("25%", "inline"),
        ("5 rows", "replay-1"),
        ("1 rows", "replay-0"),
    ],
)
def test_layers_as_on_a_device(
    demo_model: Path, make_tiers: TiersFactory, reference: Reference, pool: str, mode: str
) -> None:
    """The CPU stands in for a device: kernels look slots up and count, the host reads the counts after each pass."""
    expected = reference(demo_model, "bf16")
    tiers = make_tiers(pool=pool, **MODES[mode])
    with open_engine(demo_model, tiers, {"kernels": True, "shuffle_slots": 3}) as engine:
        assert_identical(expected, run_workloads(engine))
        service = engine.service
        service.collect()
        routed = service.metrics.value("ziggurat_routed_pairs_total")
        hit, missed = (service.metrics.value(f"ziggurat_{name}_pairs_total") for name in ("hit", "missed"))
        assert routed == hit + missed > 0
        assert (missed == 0) == (pool == "100%")


@pytest.mark.parametrize("codec", ["w2", "fp4"])
@pytest.mark.parametrize("mode", ["inline", "replay-1"])
def test_codecs(
    demo_model: Path, make_tiers: TiersFactory, reference: Reference, codec: str, mode: str
) -> None:
    expected = reference(demo_model, codec)
    with open_engine(demo_model, make_tiers(pool="25%", codec=codec, **MODES[mode])) as engine:
        assert_identical(expected, run_workloads(engine))


@pytest.mark.parametrize(("pool", "mode"), [("25%", "inline"), ("50%", "replay-3"), ("1 rows", "replay-1")])
def test_architectures(
    strong_model: Path, make_tiers: TiersFactory, reference: Reference, pool: str, mode: str
) -> None:
    expected = reference(strong_model, "bf16")
    with open_engine(strong_model, make_tiers(pool=pool, **MODES[mode])) as engine:
        assert_identical(expected, run_workloads(engine))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("eviction", ["lru", "lfu-decay"])
def test_slot_order_and_policy(
    demo_model: Path, make_tiers: TiersFactory, reference: Reference, seed: int, eviction: str
) -> None:
    expected = reference(demo_model, "bf16")
    tiers = make_tiers(pool="25%", arena="0", eviction=eviction)
    with open_engine(demo_model, tiers, {"shuffle_slots": seed}) as engine:
        assert_identical(expected, run_workloads(engine))


def test_without_replay_the_test_fails(
    demo_model: Path, make_tiers: TiersFactory, reference: Reference
) -> None:
    """Negative control: leaving missing experts out must be visible, or none of the tests above means anything."""
    expected = reference(demo_model, "bf16")["long prompt"]
    with open_engine(demo_model, make_tiers(pool="25%", mode="replay"), {"replay": False}) as engine:
        found = engine.run([LONG, *("# The quick brown fox",)], 4)
        assert engine.service.metrics.value("ziggurat_missed_pairs_total") > 0
    with open_engine(demo_model, make_tiers(pool="25%", mode="replay")) as engine:
        repaired = engine.run([LONG, *("# The quick brown fox",)], 4)
    assert differences(repaired, found)
    assert expected.steps
