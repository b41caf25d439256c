"""Two ranks with unequal pools: the same bits, the same number of passes, and one fate when a rank's disk fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engines import BATCH, LONG, SINGLE
from support.processes import engine_process, make_job
from ziggurat.integration.vllm.capture import CapturedStep, read_capture
from ziggurat.residency.config import TiersConfig

TiersFactory = Callable[..., TiersConfig]

START_SECONDS = 240
PHASE_SECONDS = 180
PHASES: list[dict[str, Any]] = [
    {"name": "alone", "prompts": [SINGLE], "tokens": 8},
    {"name": "batch", "prompts": list(BATCH), "tokens": 6},
    {"name": "long", "prompts": [LONG, BATCH[0]], "tokens": 3},
]


def job(
    model: Path, tiers: TiersConfig, folder: Path, phases: list[dict[str, Any]], **debug: Any
) -> dict[str, Any]:
    return make_job(model, tiers, folder, phases, {"tensor_parallel_size": 2}, **debug)


def steps_of(folder: Path) -> list[CapturedStep]:
    ranks = [list(read_capture(folder / f"logits.rank{rank}.npys")) for rank in (0, 1)]
    assert ranks[0]
    assert len(ranks[0]) == len(ranks[1])
    return ranks[0]


def same_bits(a: list[CapturedStep], b: list[CapturedStep]) -> bool:
    return len(a) == len(b) and all(
        x.tokens == y.tokens and np.array_equal(x.logits.view(np.uint32), y.logits.view(np.uint32))
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def reference(
    demo_model: Path, make_tiers: TiersFactory, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[CapturedStep], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tp-reference")
    reports = {}
    with engine_process(job(demo_model, make_tiers(pool="100%"), folder, PHASES), folder) as child:
        assert child.phase("ready", START_SECONDS), child.tail()
        for phase in PHASES:
            reports[phase["name"]] = child.phase(phase["name"], PHASE_SECONDS)
            assert reports[phase["name"]], child.tail()
    return steps_of(folder), reports


@pytest.mark.parametrize(
    "miss", [{"mode": "inline"}, {"mode": "replay", "max_replays": 2}], ids=["inline", "replay"]
)
def test_unequal_pools_and_a_failing_rank(
    demo_model: Path,
    make_tiers: TiersFactory,
    reference: tuple[list[CapturedStep], dict[str, Any]],
    tmp_path: Path,
    miss: dict[str, Any],
) -> None:
    """Identity first; then rank 1 alone cannot read: both ranks end the request and name the expert; then all heals."""
    expected, reports = reference
    tiers = make_tiers(
        pool=["40%", "6 rows"],
        arena="0",
        disk={"faults": str(tmp_path / "faults-{rank}.json"), "rebuild": False},
        **miss,
    )
    faults = str(tmp_path / "faults-1.json")
    broken = {"rules": [{"kind": "error"}]}
    phases = [
        *PHASES,
        {"name": "broken", "prompts": [SINGLE], "tokens": 8, "faults": {faults: broken}},
        {"name": "healed", "prompts": [SINGLE], "tokens": 8, "faults": {faults: {}}},
    ]
    with engine_process(job(demo_model, tiers, tmp_path, phases), tmp_path) as child:
        assert child.phase("ready", START_SECONDS), child.tail()
        for phase in PHASES:
            assert child.phase(phase["name"], PHASE_SECONDS) == reports[phase["name"]], child.tail()
        failed = child.phase("broken", PHASE_SECONDS)
        healed = child.phase("healed", PHASE_SECONDS)
    assert same_bits(expected, steps_of(tmp_path)[: len(expected)])
    assert failed is not None
    assert failed["reasons"] == ["error"], failed
    assert "expert" in failed["stops"][0]
    assert "rank 1" in failed["stops"][0]
    assert healed is not None
    assert healed["tokens"] == reports["alone"]["tokens"]


def test_without_consensus_the_test_fails(
    demo_model: Path,
    make_tiers: TiersFactory,
    reference: tuple[list[CapturedStep], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Negative control: ranks that decide alone run different numbers of passes and hang or answer differently."""
    expected, reports = reference
    tiers = make_tiers(pool=["100%", "6 rows"], arena="0", mode="replay", max_replays=2)
    with engine_process(job(demo_model, tiers, tmp_path, PHASES[:1], consensus=False), tmp_path) as child:
        assert child.phase("ready", START_SECONDS), child.tail()
        answer = child.phase("alone", 45)
    captured = [list(read_capture(tmp_path / f"logits.rank{rank}.npys")) for rank in (0, 1)]
    alone = list(expected[: len(captured[0])])
    assert answer is None or answer != reports["alone"] or not same_bits(alone, captured[0]), json.dumps(
        answer
    )
