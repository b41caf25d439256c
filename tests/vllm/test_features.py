"""vLLM features that must work through tiers with the all-resident engine's answers."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.checkpoints import write_checkpoint
from support.engines import BATCH, LONG, SINGLE, assert_identical, run_workloads
from support.processes import engine_process, make_job
from support.server import free_port
from ziggurat.integration.determinism.compare import Outcome, differences
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.integration.vllm.capture import read_capture
from ziggurat.integration.vllm.compat import vllm_version
from ziggurat.residency.config import TiersConfig

TiersFactory = Callable[..., TiersConfig]
MODES = ("inline", "replay")


def both(
    model: Path, make_tiers: TiersFactory, mode: str, run: Callable[[Any], list[Outcome]], **engine: Any
) -> tuple[list[Outcome], list[Outcome]]:
    """The same work on an all-resident engine and behind a quarter of the experts."""
    with open_engine(model, make_tiers(pool="100%"), **engine) as resident:
        expected = run(resident)
    with open_engine(model, make_tiers(pool="25%", mode=mode), **engine) as tiered:
        found = run(tiered)
    return expected, found


def assert_all_identical(pair: tuple[list[Outcome], list[Outcome]]) -> None:
    expected, found = pair
    assert len(expected) == len(found) > 0
    for a, b in zip(expected, found, strict=True):
        assert not differences(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_seeded_sampling_with_logprobs(demo_model: Path, make_tiers: TiersFactory, mode: str) -> None:
    logprobs: list[Any] = []

    def run(engine: Any) -> list[Outcome]:
        outcome = engine.run(
            BATCH[:2], 8, temperature=0.9, top_p=0.95, seed=7, n=2, logprobs=3, prompt_logprobs=1
        )
        logprobs.append(engine.last_logprobs)
        return [outcome]

    pair = both(demo_model, make_tiers, mode, run)
    assert_all_identical(pair)
    assert len(pair[0][0].tokens) == 4
    assert logprobs[0] == logprobs[1]
    assert any(logprobs[0])


@pytest.mark.parametrize("mode", MODES)
def test_prefix_caching(demo_model: Path, make_tiers: TiersFactory, mode: str) -> None:
    def run(engine: Any) -> list[Outcome]:
        first = engine.run([LONG], 4)
        again = engine.run([LONG + "def last():\n", LONG], 4)
        scheduled = sum(sum(step.tokens) for step in again.steps)
        assert scheduled < len(LONG.split()) * 2, "the prefix cache was not used"
        return [first, again]

    assert_all_identical(both(demo_model, make_tiers, mode, run, enable_prefix_caching=True))


def test_ngram_speculation(demo_model: Path, make_tiers: TiersFactory, tmp_path: Path) -> None:
    """A process for each engine: with numba loaded, stock vLLM cannot start a second engine in one process."""
    if vllm_version().startswith("0.24"):
        pytest.skip("stock vLLM 0.24.0 itself fails with n-gram speculation on the CPU")
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    phases = [
        {
            "name": "lists",
            "prompts": ["a = [1, 2, 3]\nb = [1, 2, 3]\nc = [1, 2, 3]\nd = [1, 2,"],
            "tokens": 16,
        }
    ]
    cases = {
        "resident": make_tiers(pool="100%"),
        "inline": make_tiers(pool="25%", mode="inline"),
        "replay": make_tiers(pool="25%", mode="replay"),
    }
    answers, steps = {}, {}
    for name, tiers in cases.items():
        folder = tmp_path / name
        job = make_job(demo_model, tiers, folder, phases, {"speculative_config": speculation})
        with engine_process(job, tmp_path) as child:
            answers[name] = child.phase("lists", 240)
            assert answers[name], child.tail()
        steps[name] = list(read_capture(folder / "logits.rank0.npys"))
    for name in ("inline", "replay"):
        assert answers[name] == answers["resident"]
        assert [step.tokens for step in steps[name]] == [step.tokens for step in steps["resident"]]
        for a, b in zip(steps["resident"], steps[name], strict=True):
            assert np.array_equal(a.logits.view(np.uint32), b.logits.view(np.uint32))
    assert max(sum(step.tokens) for step in steps["resident"][1:]) > 1, "no draft token was ever verified"


def test_float32(demo_model: Path, make_tiers: TiersFactory, tmp_path: Path) -> None:
    # vLLM takes no float32 for an FP8 checkpoint, so this one is bf16.
    write_checkpoint(tmp_path, kind="qwen3", tokenizer=demo_model)

    def run(engine: Any) -> list[Outcome]:
        return [engine.run([SINGLE], 6)]

    assert_all_identical(both(tmp_path, make_tiers, "replay", run, dtype="float32"))


def test_tolerance_serves_and_counts(demo_model: Path, make_tiers: TiersFactory) -> None:
    """A tolerance lets a step keep zeroed experts; such steps are counted apart, and their experts are fetched."""
    with open_engine(demo_model, make_tiers(pool="50%", mode="replay", tolerance=1_000_000)) as engine:
        engine.run([SINGLE], 8)
        metrics = engine.service.metrics
        assert metrics.value("ziggurat_steps_total", "tolerated") > 0
        assert metrics.value("ziggurat_steps_total", "exact") == 0
        assert metrics.value("ziggurat_replay_passes_total") == 0
        assert sum(s.value for s in metrics.samples() if s.spec.name == "ziggurat_fetched_rows_total") > 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("mode", MODES)
def test_compiled(demo_model: Path, make_tiers: TiersFactory, mode: str) -> None:
    """torch.compile sees a tiered layer as one opaque op."""
    with open_engine(demo_model, make_tiers(pool="100%"), enforce_eager=False) as engine:
        expected = run_workloads(engine)
    with open_engine(demo_model, make_tiers(pool="25%", mode=mode), enforce_eager=False) as engine:
        assert_identical(expected, run_workloads(engine))


def test_counts_add_up(demo_model: Path, make_tiers: TiersFactory) -> None:
    with open_engine(demo_model, make_tiers(pool="25%", arena="8 rows")) as engine:
        outcome = engine.run(BATCH, 8)
        metrics = engine.service.metrics
        layers, top_k = 6, 4
        tokens = sum(sum(step.tokens) for step in outcome.steps)
        pairs = metrics.value("ziggurat_routed_pairs_total")
        assert pairs == tokens * layers * top_k
        hits, misses = (metrics.value(f"ziggurat_{kind}_pairs_total") for kind in ("hit", "missed"))
        assert hits + misses == pairs
        assert misses > 0
        stride = metrics.value("ziggurat_row_stride_bytes")
        rows = {s.labels: s.value for s in metrics.samples() if s.spec.name == "ziggurat_fetched_rows_total"}
        moved = {
            s.labels: s.value for s in metrics.samples() if s.spec.name == "ziggurat_fetched_bytes_total"
        }
        assert moved == {labels: count * stride for labels, count in rows.items()}
        steps = sum(s.value for s in metrics.samples() if s.spec.name == "ziggurat_steps_total")
        assert steps == len(outcome.steps)


def test_a_worker_serves_its_own_metrics(demo_model: Path, make_tiers: TiersFactory) -> None:
    """`metrics.port`: for engines without vLLM's API server."""
    port = free_port()
    values = make_tiers(pool="25%").model_dump(mode="json")
    values["metrics"] = {"port": port}
    with open_engine(demo_model, TiersConfig.from_mapping(values)) as engine:
        engine.run([SINGLE], 2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        pairs = engine.service.metrics.value("ziggurat_routed_pairs_total")
        assert f'ziggurat_routed_pairs_total{{rank="0"}} {pairs:.1f}' in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_heat_survives_a_restart(demo_model: Path, make_tiers: TiersFactory, tmp_path: Path) -> None:
    """What an engine used most is in the pool before the next one's first step, and an idle start keeps the file."""
    tiers = make_tiers(pool="25%", folder=tmp_path, heat={"path": "auto"})
    with open_engine(demo_model, tiers) as engine:
        assert engine.service.slots.used == 0
        first = engine.run([SINGLE], 8)
        hottest = engine.service.heat.order()[0][0]
    [heat] = [path for path in tmp_path.iterdir() if "heat" in path.name]
    counts = load_file(heat)["heat"]
    assert counts.any()
    with open_engine(demo_model, tiers) as engine:
        assert engine.service.slots.used == engine.service.slots.slots
        assert hottest in engine.service.slots.held()
    assert np.array_equal(load_file(heat)["heat"], counts)
    with open_engine(demo_model, tiers) as engine:
        assert not differences(first, engine.run([SINGLE], 8))
