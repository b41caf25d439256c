"""The stand-alone harness: real tiers, random rows, given routing, and outputs that do not depend on the pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness import run as harness
from bench.harness.measure import Run, Tiers, run_steps, service_over
from bench.harness.routing import Routing, TraceError, recorded, synthetic
from bench.harness.rows import MemoryPack
from bench.harness.stack import Stack
from bench.random_rows import random_rows
from bench.shapes import MoeShape
from ziggurat.kernels.codecs.registry import codec_names, get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.stores.pack import RowRequest
from ziggurat.stores.packformat import stride_of

TRACE = harness.ROOT / "bench" / "traces" / "demo_moe.npz"
SHAPE = MoeShape("tiny", layers=3, experts=8, top_k=2, hidden=64, intermediate=32)
CPU = torch.device("cpu")
REPLAY = {"mode": "replay"}


def tiny_routing(steps: int = 12, tokens: int = 2) -> Routing:
    return synthetic(steps, SHAPE.layers, SHAPE.experts, SHAPE.top_k, tokens, zipf=0.8, drift=0.3)


def steps_at(
    slots: int,
    routing: Routing,
    miss: dict[str, Any],
    codec: str = "w2",
    *,
    kernels: bool = True,
    **options: Any,
) -> Run:
    pack = MemoryPack(SHAPE, codec, distinct=11)
    stack = Stack(routing, SHAPE.hidden, CPU)
    tiers = Tiers(slots, 8 + SHAPE.rows, CPU, routing.tokens, miss, kernels)
    with service_over(pack, SHAPE, tiers, **options) as service:
        return run_steps(service, stack, routing, warm=4, graph=False)


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("miss", [REPLAY, {"mode": "inline"}])
def test_a_small_pool_gives_the_bits_of_a_full_one(codec: str, miss: dict[str, Any], kernels: bool) -> None:
    routing = tiny_routing()
    full = steps_at(SHAPE.rows, routing, miss, codec, kernels=kernels)
    small = steps_at(8, routing, miss, codec, kernels=kernels)
    assert full.outcomes == {"clean": 8}
    assert sum(small.misses) > 0
    assert small.same_bits(full)
    assert torch.isfinite(torch.stack(full.outputs).float()).all()


def test_a_pass_that_keeps_its_misses_gives_other_bits() -> None:
    routing = tiny_routing()
    wrong = steps_at(8, routing, REPLAY, replay_enabled=False)
    assert sum(wrong.misses) > 0
    assert not wrong.same_bits(steps_at(SHAPE.rows, routing, REPLAY))


def test_what_a_run_reports_adds_up() -> None:
    run = steps_at(8, tiny_routing(), REPLAY)
    found = run.summary(SHAPE.rows, stride=4096, tokens=2)
    assert found["coverage"] == round(8 / 24, 4)
    assert found["steps"] == 8 == sum(found["outcomes"].values())
    assert found["passes_per_step"] > 1
    assert found["mib_per_step"] == pytest.approx(found["rows_per_step"] * 4096 / 2**20, abs=1e-3)
    assert found["rows_per_step"] > 0
    assert found["missed_pairs_per_step"] == round(sum(run.misses) / 8, 3) > 0
    assert found["step_ms"]["min"] <= found["step_ms"]["median"] <= found["step_ms"]["p95"]


def test_the_tiers_start_with_what_the_warm_up_was_routed_to() -> None:
    """With routing that never changes nothing is missed after a start by its heat."""
    one = tiny_routing(1, 1).ids
    routing = Routing(np.repeat(one, 10, axis=0), SHAPE.experts, "still")
    run = steps_at(SHAPE.layers * SHAPE.top_k, routing, REPLAY)
    assert run.misses == [0] * 6
    assert run.rows == 0


def test_synthetic_routing_is_distinct_skewed_and_repeatable() -> None:
    routing = synthetic(200, 2, 16, 4, 3, zipf=1.5, drift=0.0)
    assert routing.ids.shape == (200, 2, 3, 4)
    assert (np.sort(routing.ids, axis=-1)[..., 1:] > np.sort(routing.ids, axis=-1)[..., :-1]).all()
    counts = routing.counts(0, 200)
    assert counts.sum() == 200 * 2 * 3 * 4
    assert counts.max(axis=1).min() > 3 * np.median(counts, axis=1).max()
    assert np.array_equal(routing.ids, synthetic(200, 2, 16, 4, 3, zipf=1.5, drift=0.0).ids)
    drifting = synthetic(200, 2, 16, 4, 3, zipf=1.5, drift=1.0).counts(100, 200)
    assert drifting.max() < counts.max()


def test_recorded_routing_keeps_positions_and_sequences_apart() -> None:
    with np.load(TRACE) as file:
        trace = file["topk_ids"]
    routing = recorded(TRACE, 3, repeat=2, steps=20)
    assert routing.ids.shape == (20, 12, 3, 4)
    assert routing.experts == 32
    for step, layer, token in ((0, 0, 0), (19, 5, 2), (7, 3, 1)):
        assert np.array_equal(routing.ids[step, layer, token], trace[token, step, layer])
        assert np.array_equal(routing.ids[step, layer + 6, token], trace[token + 3, step, layer])


@pytest.mark.parametrize(
    ("tokens", "steps", "message"), [(33, 4, "32 sequences"), (1, 513, "512 positions, not 1 of 513")]
)
def test_a_trace_that_is_too_short(tokens: int, steps: int, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        recorded(TRACE, tokens, steps=steps)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", counts=np.zeros(3))
    with pytest.raises(TraceError, match="counts"):
        recorded(tmp_path / "other.npz", 1)
    np.savez(tmp_path / "flat.npz", ids=np.zeros((3, 4), dtype=np.uint8))
    with pytest.raises(TraceError, match=r"\[3, 4\]"):
        recorded(tmp_path / "flat.npz", 1)
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(TraceError, match="no trace"):
        recorded(tmp_path / "text.npz", 1)


@pytest.mark.parametrize("codec", codec_names())
def test_random_rows_are_finite_distinct_and_of_a_useful_size(codec: str) -> None:
    geometry = ExpertGeometry(256, 128)
    coder = get_codec(codec)
    stride = stride_of(coder.row_bytes(geometry))
    rows = random_rows(codec, geometry, 4, stride, CPU, seed=3)
    assert rows.shape == (4, stride)
    assert torch.equal(rows, random_rows(codec, geometry, 4, stride, CPU, seed=3))
    assert len({bytes(row.numpy()) for row in rows}) == 4
    expert = coder.decode(rows[2], geometry)
    for matrix in (expert.w13, expert.w2):
        assert torch.isfinite(matrix).all()
        assert 0.3 < float(matrix.std()) * matrix.shape[1] ** 0.5 < 3


def test_the_pack_in_memory_serves_aliased_rows() -> None:
    pack = MemoryPack(SHAPE, "fp4", distinct=5)
    buffers = [bytearray(pack.header.stride) for _ in range(2)]
    wanted = [RowRequest(0, 3, memoryview(buffers[0])), RowRequest(2, 2, memoryview(buffers[1]))]
    results = list(pack.read_rows(wanted))
    assert [(r.layer, r.expert, r.nbytes, r.error) for r in results] == [
        (0, 3, pack.header.stride, None),
        (2, 2, pack.header.stride, None),
    ]
    assert buffers[0] == bytes(pack.row(3).numpy()) == buffers[1] == bytes(pack.row(18).numpy())
    assert buffers[0] != bytes(pack.row(4).numpy())


def test_a_forward_reads_the_loaded_step() -> None:
    routing = tiny_routing()
    stack = Stack(routing, SHAPE.hidden, CPU, dense_bytes=SHAPE.hidden * 2 * 80)
    seen = []

    def moe(layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen.append((layer, ids.numpy().copy()))
        assert torch.allclose(weights.sum(-1), torch.ones(stack.tokens))
        return torch.zeros_like(x)

    stack.load(5)
    first = stack.forward(moe).clone()
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert all(np.array_equal(ids, routing.ids[5, layer]) for layer, ids in seen)
    stack.load(6)
    assert not torch.equal(stack.forward(moe), first)


def test_the_command_compares_and_writes_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "demo", "--device", "cpu", "--trace", str(TRACE), "--warm", "4", "--steps", "4"]
    options = ["--coverage", "100", "25", "--results", str(tmp_path), "--commit", "abc", "--tokens", "1", "2"]
    assert harness.main([*arguments, *options]) == 0
    content = json.loads((tmp_path / "harness.json").read_text())
    assert set(content["runs"]) == {"demo w2 M=1", "demo w2 M=2"}
    found = content["runs"]["demo w2 M=2"]
    assert (found["layers"], found["experts"], found["top_k"], found["tokens"]) == (6, 32, 4, 2)
    assert found["commit"] == "abc"
    assert [run["coverage"] for run in found["runs"]] == [1.0, 0.25]
    assert all(run["same_bits"] for run in found["runs"])
    assert "25.0%" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--coverage", "50"], ["--steps", "0"], ["--coverage", "100", "0"]])
def test_arguments_that_measure_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        harness.main(["--device", "cpu", *arguments])
    assert refusal.value.code == 2


def test_a_trace_that_does_not_fit_is_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.main(["--device", "cpu", "--trace", str(TRACE), "--tokens", "64"]) == 1
    assert "32 sequences" in capsys.readouterr().err
