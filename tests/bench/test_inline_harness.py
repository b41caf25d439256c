"""Inline misses at tiny sizes: what is compared, what a report says, churn, prompts and timelines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import inline_gather
from bench.gpu_timing import Span
from bench.harness import churn as churning
from bench.harness import decode, inline, prefill, timeline
from bench.harness.decode import Case
from bench.harness.memory import SharedMemory
from bench.harness.routing import synthetic
from bench.harness.rows import MemoryPack
from bench.harness.stack import Stack
from bench.shapes import MoeShape
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.placement import Placement, open_kernels

CPU = torch.device("cpu")
SHAPE = MoeShape("tiny", layers=3, experts=16, top_k=4, hidden=64, intermediate=32)


def case(tokens: int, seed: int = 7) -> Case:
    routing = synthetic(12, SHAPE.layers, SHAPE.experts, SHAPE.top_k, tokens, zipf=1.2, drift=0.3, seed=seed)
    return Case(f"M={tokens}", routing, 4, Stack(routing, SHAPE.hidden, CPU))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(SHAPE, MemoryPack(SHAPE, "w2", 23), CPU, 32) as shared:
        yield shared


def test_all_modes_serve_the_same_steps_from_one_memory(memory: SharedMemory) -> None:
    cases = [case(1), case(3)]
    visited = []
    decode.measure(
        memory,
        cases,
        [0.5],
        left=lambda: 1.0,
        done=lambda: None,
        visit=lambda s, m, c: visited.append((m, c)),
    )
    assert visited == [("auto", 1.0), ("forced", 1.0), ("inline", 0.5), ("replay", 0.5)]
    for one in cases:
        found = decode.report(one, 4096, SHAPE.rows, 50.0)
        assert decode.all_same(found)
        assert found["forced"]["missed_rows_per_step"] == 0
        for host in (found["resident_host_us"], found["forced"]["host_us"]):
            assert 0 < host["before"] < host["whole"]
        run = found["runs"][0]
        assert run["inline"]["passes_per_step"] == 1.0
        assert run["replay"]["passes_per_step"] > 1.0
        assert set(run["inline"]["outcomes"]) <= {"inline", "clean"}
        assert run["inline"]["missed_rows_per_step"] > 0
        link_ms = run["inline"]["missed_rows_per_step"] * 4096 / 50e6
        assert run["inline"]["link_ms"] == pytest.approx(link_ms, rel=1e-2, abs=1e-4)
        assert run["predicted"]["missed_rows_per_step"] == pytest.approx(
            run["inline"]["missed_rows_per_step"], rel=0.35
        )
        assert "same bits" in decode.table(found)


def test_a_wrong_bit_is_told(memory: SharedMemory) -> None:
    one = case(2)
    decode.measure(memory, [one], [0.5], left=lambda: 1.0, done=lambda: None, modes=("inline",))
    one.runs[0.5]["inline"].outputs[3][0, 0] += 1
    found = decode.report(one, 4096, SHAPE.rows, None)
    assert not decode.all_same(found)
    assert "DIFFERENT" in decode.table(found)
    assert "ratio" not in found["runs"][0]["inline"]


def test_without_time_no_pool_is_begun_but_what_there_is_is_kept(memory: SharedMemory) -> None:
    saved = []
    one = case(1)
    decode.measure(memory, [one], [0.5], left=lambda: 0.0, done=lambda: saved.append(1))
    assert one.resident is not None
    assert one.runs == {}
    assert len(saved) == 3
    assert decode.report(one, 4096, SHAPE.rows, None)["runs"] == []


def test_a_prompt_streams_and_leaves_the_decode_set(memory: SharedMemory) -> None:
    routing = prefill.prompt_routing(
        inline.TRACE, MoeShape("p", SHAPE.layers, 32, 4, SHAPE.hidden, SHAPE.intermediate), 24
    )
    assert routing.ids.shape == (1, 3, 24, 4)
    routing.ids[:] %= SHAPE.experts
    stack = Stack(synthetic(1, 3, 16, 4, 24, seed=3), SHAPE.hidden, CPU)
    decoding = synthetic(4 + 2 * prefill.HITS_OVER, 3, 16, 4, 1, zipf=1.2, drift=0.1)
    with memory.service(SHAPE.rows, "auto") as service:
        service.warm_start()
        resident = prefill.serve_prompt(service, stack)
    assert resident.bytes == 0
    with memory.service(12, "inline") as service:
        hits = prefill.hit_rates(service, Stack(decoding, SHAPE.hidden, CPU), decoding, 4, stack)
    streamed = hits.pop("prompt")
    found = prefill.report(resident, streamed, hits, 50.0)
    assert found["same_bits"]
    stride = memory.pack.header.stride
    assert streamed.bytes == pytest.approx((SHAPE.rows - 12) * stride, rel=0.25)
    assert hits["after"] == hits["after_without_prompt"]


def test_churn_leaves_every_bit_alone() -> None:
    shape = MoeShape("churned", 3, 16, 2, 64, 32)
    found = churning.churn(CPU, "w2", 70, left=lambda: 1.0, shape=shape, distinct=23)
    assert found["steps"] == 70 == sum(found["outcomes"].values())
    assert found["steps_with_other_bits"] == 0
    assert found["evicted_from_the_arena"] > 0
    assert found["rows_fetched_by_the_device"] > 0
    assert churning.churn(CPU, "w2", 70, left=lambda: 0.0, shape=shape, distinct=23)["steps"] == 0


def test_a_timeline_adds_up() -> None:
    found = timeline.from_zero(
        [
            Span("gather_missing", 110.0, 40.0),
            Span("route_small", 100.0, 10.0),
            Span("gate_up", 112.0, 20.0),
            Span("combine", 160.0, 5.0),
        ]
    )
    assert [one.start for one in found] == [0.0, 10.0, 12.0, 60.0]
    said = timeline.summary(found, 4096)
    assert (said["span_us"], said["busy_us"], said["idle_us"]) == (65.0, 55.0, 10.0)
    assert (said["gather_us"], said["gather_alone_us"]) == (40.0, 20.0)
    assert said["kernels"][0] == {"name": "gather_missing", "count": 1, "us": 40.0}
    assert said["first_layers"][0] == "0.0 +10.0 route_small"


def test_the_command_writes_what_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--shape",
        "demo",
        "--layers",
        "2",
        "--device",
        "cpu",
        "--parts",
        "decode",
        "--tokens",
        "1",
        "2",
    ]
    steps = ["--warm", "2", "--steps", "2", "--batch-warm", "2", "--batch-steps", "2", "--coverage", "50"]
    assert inline.main([*arguments, *steps, "--results", str(tmp_path), "--commit", "abc"]) == 0
    content = json.loads((tmp_path / "inline.json").read_text())
    assert content["commit"] == "abc"
    labels = ["mapped M=1", "adjustable M=1", "mapped M=2", "adjustable M=2"]
    assert [one["label"] for one in content["cases"]] == labels
    assert all(decode.all_same(one) for one in content["cases"])
    assert "50% inline" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--coverage", "100"], ["--steps", "0"], ["--hit", "1.5"]])
def test_arguments_that_measure_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        inline.main(["--device", "cpu", *arguments])


@pytest.mark.parametrize(("misses", "batch"), [(1, (1, 1)), (6, (1, 6)), (16, (2, 8)), (32, (4, 8))])
def test_batches_that_name_so_many_experts(misses: int, batch: tuple[int, int]) -> None:
    assert inline_gather.batch_of(misses) == batch


def test_emptied_layers_miss_all_their_experts_once() -> None:
    geometry = ExpertGeometry(64, 32)
    codec = get_codec("w2")
    stride = 8192
    place = Placement(CPU, torch.bfloat16, 2, kernels=True)
    kernels = open_kernels(place, ServiceGeometry(2, 16, 5, 64, 32, (0, 1)), codec)
    assert kernels is not None
    arena, pool = torch.zeros(10, stride, dtype=torch.uint8), torch.zeros(10, stride, dtype=torch.uint8)
    layers = inline_gather.layers_of(kernels, place, "w2", geometry, 5, arena, pool, layers=2, experts=16)
    for expected in (5, 0):
        layers.run(layers.admission)
        assert layers.missing() == expected
    layers.empty()
    layers.run(layers.admission)
    assert layers.missing() == 5
    assert int(layers.tally[0]) == 0
    layers.empty()
    layers.run(None)
    assert int(layers.tally[0]) == 10
