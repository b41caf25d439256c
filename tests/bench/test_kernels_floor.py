"""What the kernel benchmark compares its times with, and what it plans to measure."""

from __future__ import annotations

import pytest
import torch

from bench import kernels
from bench.kernel_names import short_name
from bench.shapes import SHAPES
from bench.vllm_peers import Peer

RATES = {"read_tb_per_s": 4.0, "copy_tb_per_s": 4.0, "matmul_tflops": 700.0}
DS4 = SHAPES["deepseek-v4-flash"]
W2_ROW = DS4.weights * 9 // 32


def test_a_row_of_two_bits_is_what_the_design_says() -> None:
    assert W2_ROW == 7_077_888
    assert SHAPES["glm-5.2"].weights * 9 // 32 == 10_616_832
    assert DS4.rows == 11008


def test_one_token_is_bound_by_bytes() -> None:
    found = kernels.floor(DS4, 1, 6.0, W2_ROW, us=20.0, rates=RATES)
    assert found["bound"] == "bytes"
    assert found["mb"] == pytest.approx(42.467, abs=0.01)
    assert found["bytes_floor_us"] == pytest.approx(10.62, abs=0.01)
    assert found["of_floor"] == pytest.approx(0.531, abs=0.001)
    assert found["tb_per_s"] == pytest.approx(2.123, abs=0.001)


def test_a_long_prompt_is_bound_by_operations() -> None:
    found = kernels.floor(DS4, 8192, 256.0, W2_ROW, us=5000.0, rates=RATES)
    assert found["bound"] == "operations"
    flop = 2 * 8192 * 6 * 3 * 4096 * 2048
    assert found["flop_floor_us"] == pytest.approx(flop / 700e6, abs=0.01)
    assert found["of_floor"] == pytest.approx(flop / 700e6 / 5000, abs=1e-3)


def test_inputs_name_each_expert_once_a_token() -> None:
    call = kernels.inputs(DS4, 16, torch.device("cpu"), seed=1)
    assert call.ids.shape == (16, 6)
    assert call.ids.dtype == torch.int32
    assert all(len(set(row)) == 6 for row in call.ids.tolist())
    assert call.distinct == len(set(call.ids.flatten().tolist()))
    assert torch.allclose(call.weights.sum(-1), torch.ones(16))
    assert not torch.equal(call.ids, kernels.inputs(DS4, 16, torch.device("cpu"), seed=2).ids)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_a_graph_reads_far_more_than_a_cache_holds(tokens: int) -> None:
    peer = Peer("p", (), W2_ROW)
    job = kernels.Job(peer.name, DS4, peer.layers, peer.expert_bytes)
    pieces = kernels._pieces(job, tokens)
    assert pieces * min(256, tokens * 6) * W2_ROW > 1e9
    assert pieces <= 48


def test_the_plan_puts_quantized_kernels_first() -> None:
    options = kernels._parse([])
    plan = kernels._plan(options)
    assert plan[:4] == [
        ("deepseek-v4-flash", "w2"),
        ("deepseek-v4-flash", "fp4"),
        ("glm-5.2", "w2"),
        ("glm-5.2", "fp4"),
    ]
    assert set(plan[4:]) == {(s, k) for s in options.shape for k in ("bf16", "marlin")}
    without = kernels._plan(kernels._parse(["--no-peers", "--codec", "w2"]))
    assert [kind for _, kind in without] == ["w2", "w2"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::reduce_kernel<512, 1>(at::Foo)", "reduce_kernel"),
        ("moe_up_w2", "moe_up_w2"),
        ("Memset (Device)", "Memset"),
    ],
)
def test_kernel_names(name: str, short: str) -> None:
    assert short_name(name) == short
