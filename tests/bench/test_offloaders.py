"""vLLM's offloaders under the harness's layers: what stays on the GPU, what vLLM's classes take, and the bits."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness import decode, inline, offloaders
from bench.harness.decode import Case
from bench.harness.link import link_of
from bench.harness.measure import Run
from bench.harness.memory import SharedMemory
from bench.harness.offloaders import NONE, PREFETCH, UVA, Plan
from bench.harness.routing import synthetic
from bench.harness.rows import MemoryPack
from bench.harness.stack import Stack
from bench.shapes import MoeShape

SHAPE = MoeShape("tiny", layers=8, experts=16, top_k=4, hidden=256, intermediate=128)
OFFLOADER = "vllm.model_executor.offloader"


def case(tokens: int, device: torch.device) -> Case:
    routing = synthetic(12, SHAPE.layers, SHAPE.experts, SHAPE.top_k, tokens, zipf=1.2, drift=0.3, seed=7)
    return Case(f"M={tokens}", routing, 4, Stack(routing, SHAPE.hidden, device, dense_bytes=1 << 18))


@pytest.mark.parametrize(
    ("layers", "coverage", "offloaded"),
    [(16, 0.5, 8), (16, 0.25, 12), (16, 0.19, 13), (8, 0.25, 6), (4, 0.19, 4)],
)
def test_uva_offloads_whole_layers_until_the_rest_fits(layers: int, coverage: float, offloaded: int) -> None:
    assert offloaders.uva_plan(layers, coverage) == Plan(UVA, layers, offloaded)


@pytest.mark.parametrize(
    ("layers", "coverage", "offloaded", "group", "in_group"),
    [(16, 0.5, 9, 5, 3), (16, 0.25, 13, 6, 5), (16, 0.19, 14, 8, 7), (8, 0.25, 7, 8, 7), (4, 0.25, 4, 1, 1)],
)
def test_the_prefetch_buffer_counts_as_gpu_memory(
    layers: int, coverage: float, offloaded: int, group: int, in_group: int
) -> None:
    plan = offloaders.prefetch_plan(layers, coverage)
    assert plan == Plan(PREFETCH, layers, offloaded, 1, group, in_group)
    assert len(offloaders.prefetched(layers, group, in_group)) == offloaded


def test_less_than_a_layer_holds_no_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    assert offloaders.prefetch_plan(4, 0.19) is None
    plans = offloaders.plans_for(4, [0.5, 0.19])
    assert [(coverage, plan.name) for coverage, plan in plans] == [
        (1.0, NONE),
        (0.19, UVA),
        (0.5, UVA),
        (0.5, PREFETCH),
    ]
    assert "one layer of 4 is more than 19%" in capsys.readouterr().out


def test_what_the_options_of_a_server_would_be() -> None:
    gib = 1 << 30
    assert Plan(UVA, 8, 6).setting(2 * gib) == "--cpu-offload-gb 11.0"
    assert Plan(PREFETCH, 8, 7, 1, 5, 4).setting(gib) == "--offload-group-size 5 --offload-num-in-group 4"
    assert Plan(NONE, 8).setting(gib) == ""


def test_a_report_names_the_rows_that_were_moved() -> None:
    def ran(ms: float, rows: int) -> Run:
        outputs = [torch.ones(1, 4, dtype=torch.bfloat16) for _ in range(2)]
        return Run(4, ms=[ms, ms], rows=rows, outputs=outputs, links=[40.0, 60.0] if rows else [])

    one = offloaders.Offloaded(0.5, Plan(UVA, 8, 4), (0, 1, 2, 3), 0.5, True, "--x", ran(3.0, 20))
    found = offloaders.report([one], ran(1.0, 0), 10_000_000, 80.0)[0]
    assert (found["moved_rows_per_step"], found["offloaded_layers"], found["same_bits"]) == (10.0, 4, True)
    assert (found["link_gb_per_s"], found["link_ms"], found["ratio"]) == (50.0, 2.0, 1.0)
    assert (found["limit_ratio"], found["ratio_to_best_link"]) == (1.5, round(3 / 2.25, 4))
    line = offloaders.table([found])
    assert "50.0% on the GPU, 4 layers offloaded" in line
    assert line.endswith("same bits")


def test_without_vllm_the_part_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert inline.main(["--device", "cpu", "--parts", "decode", "offloaders"]) == 1
    assert "the part offloaders needs vLLM 0.24 or later with vllm.config.offload" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        inline.main(["--device", "cpu", "--parts", "offloaders"])


@pytest.mark.vllm
def test_vllms_class_leaves_the_cpu_alone_and_layers_keep_their_bits() -> None:
    pytest.importorskip(OFFLOADER)
    cpu = torch.device("cpu")
    one = case(3, cpu)
    found: dict[str, list[offloaders.Offloaded]] = {}
    with SharedMemory(SHAPE, MemoryPack(SHAPE, "w2", 23), cpu, 8) as memory:
        decode.measure(memory, [one], [0.5], left=lambda: 1.0, done=lambda: None)
        offloaders.measure(memory, [one], [0.5], found, left=lambda: 1.0, done=lambda: None)
        offloaders.measure(memory, [one], [0.5], {}, left=lambda: 0.0, done=pytest.fail)
    assert one.resident is not None
    assert [run.plan.name for run in found["M=3"]] == [NONE, UVA]
    for said in offloaders.report(found["M=3"], one.resident, 4096, None):
        assert said["same_bits"]
        assert (said["offloaded_layers"], said["gpu_share"], said["graph"]) == (0, 1.0, False)


@pytest.mark.vllm
def test_vllms_prefetch_class_takes_the_layers_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch = pytest.importorskip(f"{OFFLOADER}.prefetch")
    taken: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(prefetch, "_ModuleOffloader", lambda module, **rest: taken.append(module))
    plan = offloaders.prefetch_plan(16, 0.25)
    assert plan is not None
    rows = torch.zeros(2, 4096, dtype=torch.uint8)
    layers = [offloaders.Layer(rows, lambda rows, x: x) for _ in range(16)]
    offloaders.offloader_of(plan, rows.nbytes).wrap_modules(iter(layers))
    numbers = tuple(number for number, layer in enumerate(layers) if any(layer is one for one in taken))
    assert numbers == offloaders.prefetched(16, plan.group, plan.in_group)


@pytest.mark.vllm
@pytest.mark.parametrize("offloaded", range(1, 9))
def test_vllms_uva_class_stops_after_the_layers_of_the_plan(offloaded: int) -> None:
    pytest.importorskip(OFFLOADER)
    layer_bytes = 256 * 6912 << 10
    offloader = offloaders.offloader_of(Plan(UVA, 8, offloaded), layer_bytes)
    most = offloader.cpu_offload_max_bytes  # it offloads while it has less than that
    assert (offloaded - 1) * layer_bytes < most <= offloaded * layer_bytes


@pytest.mark.gpu
@pytest.mark.vllm
def test_both_offloaders_move_rows_and_no_bit_changes() -> None:
    pytest.importorskip(OFFLOADER)
    device = torch.device("cuda", 0)
    cases = [case(1, device), case(3, device)]
    found: dict[str, list[offloaders.Offloaded]] = {}
    link = link_of(device)
    with SharedMemory(SHAPE, MemoryPack(SHAPE, "w2", 23), device, 8) as memory:
        decode.measure(memory, cases, [0.5], left=lambda: 1.0, done=lambda: None, link=link)
        offloaders.measure(memory, cases, [0.5, 0.25], found, left=lambda: 1.0, done=lambda: None, link=link)
    assert link is not None
    for one in cases:
        assert one.resident is not None
        assert len(one.resident.links) == 5
        said: list[dict[str, Any]] = offloaders.report(found[one.label], one.resident, 4096, link.best)
        assert all(run["same_bits"] and run["graph"] for run in said)
        shares = [(run["offloader"], run["offloaded_layers"], run["gpu_share"]) for run in said]
        assert shares == [
            (NONE, 0, 1.0),
            (UVA, 6, 0.25),
            (PREFETCH, 7, 0.25),
            (UVA, 4, 0.5),
            (PREFETCH, 5, 0.5),
        ]
        wanted = [len(np.unique(step[layer])) for step in one.routing.ids[one.warm :] for layer in range(6)]
        steps = one.routing.steps - one.warm
        assert said[1]["moved_rows_per_step"] == pytest.approx(sum(wanted) / steps, abs=1e-3)
        assert said[2]["moved_rows_per_step"] == 7 * SHAPE.experts
