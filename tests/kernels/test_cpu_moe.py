"""The CPU reference: right to float64, and a token's bits depend on nothing but its input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.kernels.codecs.base import DecodedExpert
from ziggurat.kernels.cpu import moe, rowwise
from ziggurat.kernels.cpu.moe import combine, expert_ffn

SHAPES = [(64, 64), (64, 512), (256, 128), (96, 352), (512, 64), (130, 75)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_expert(hidden: int, intermediate: int, seed: int = 0) -> DecodedExpert:
    generator = torch.Generator().manual_seed(seed)
    return DecodedExpert(
        w13=torch.randn(2 * intermediate, hidden, generator=generator),
        w2=torch.randn(hidden, intermediate, generator=generator),
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_token_alone_and_among_any_others(
    hidden: int, intermediate: int, threads: int, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if one_by_one:  # what a BLAS that is not position-free would get
        monkeypatch.setattr(rowwise, "position_free", lambda *_: False)
    expert = make_expert(hidden, intermediate)
    generator = torch.Generator().manual_seed(1)
    token = torch.randn(1, hidden, generator=generator).bfloat16()
    alone = expert_ffn(token, expert)
    assert alone.isfinite().all()
    for count in (2, 8, 11):
        for neighbours in ("random", "nan", "infinite", "zero", "huge"):
            others = torch.randn(count, hidden, generator=generator)
            fill = {"nan": float("nan"), "infinite": float("inf"), "zero": 0.0, "huge": 3e38}
            if neighbours in fill:
                others.fill_(fill[neighbours])
            for place in {0, count // 2, count - 1} if neighbours != "random" else range(count):
                batch = others.bfloat16()
                batch[place] = token[0]
                assert same_bits(expert_ffn(batch, expert)[place], alone[0])


def test_a_large_batch_is_its_tokens_one_by_one(threads: int) -> None:
    """Long enough that torch would share element-wise work among threads."""
    expert = make_expert(64, 512)
    batch = torch.randn(150, 64, generator=torch.Generator().manual_seed(2)).half()
    together = expert_ffn(batch, expert, clamp=3.0)
    for place in range(0, 150, 7):
        assert same_bits(expert_ffn(batch[place : place + 1], expert, clamp=3.0)[0], together[place])


def test_activation_is_the_same_at_every_place() -> None:
    rng = np.random.default_rng(0)
    value = np.float32(rng.standard_normal())
    for size in (1, 2, 15, 16, 17, 31, 33, 64, 1000, 40001):
        array = rng.standard_normal(size).astype(np.float32)
        for place in {0, size // 3, size - 1, max(0, size - 5)}:
            array[place] = value
            assert moe._silu(array)[place].tobytes() == moe._silu(np.array([value]))[0].tobytes()


def test_strided_and_shifted_input_changes_nothing() -> None:
    expert = make_expert(96, 64)
    batch = torch.randn(11, 96)
    reference = expert_ffn(batch, expert)
    wide = torch.randn(11, 97)
    wide[:, 1:] = batch
    assert same_bits(expert_ffn(wide[:, 1:], expert), reference)
    assert same_bits(expert_ffn(batch.T.contiguous().T, expert), reference)


def test_no_tokens() -> None:
    assert expert_ffn(torch.empty(0, 64), make_expert(64, 32)).shape == (0, 64)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    clamp=st.one_of(st.none(), st.floats(0.5, 8)),
)
def test_numbers_are_those_of_float64(seed: int, dtype: torch.dtype, clamp: float | None) -> None:
    hidden, intermediate = 64, 96
    expert = make_expert(hidden, intermediate, seed)
    x = (torch.randn(5, hidden, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)
    gate, up = (x.double() @ expert.w13.double().T).chunk(2, dim=1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    h = (gate * torch.sigmoid(gate) * up).to(torch.float32)
    expected = h.double() @ expert.w2.double().T
    error = (expert_ffn(x, expert, clamp=clamp).double() - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


def test_hidden_activations_are_rounded_to_the_input_type() -> None:
    """One channel, so that the hidden number is visible in the result."""
    expert = DecodedExpert(w13=torch.ones(2, 1), w2=torch.ones(1, 1))
    x = torch.tensor([[1.0]])
    exact = expert_ffn(x, expert)
    assert exact.dtype == torch.float32
    assert abs(float(exact) - 0.7310586) < 1e-6
    assert float(expert_ffn(x.bfloat16(), expert)) == float(exact.bfloat16())
    assert float(expert_ffn(x.half(), expert)) == float(exact.half())


def test_clamp_limits_the_gate_above_and_up_on_both_sides() -> None:
    expert = DecodedExpert(w13=torch.tensor([[1.0, 0.0], [0.0, 1.0]]), w2=torch.ones(2, 1))

    def at(gate: float, up: float) -> float:
        return float(expert_ffn(torch.tensor([[gate, up]]), expert, clamp=2.0)[0, 0])

    def silu(value: float) -> float:
        return value / (1 + math.exp(-value))

    assert at(9.0, 9.0) == pytest.approx(silu(2.0) * 2.0, rel=1e-6)
    assert at(9.0, -9.0) == pytest.approx(silu(2.0) * -2.0, rel=1e-6)
    assert at(-9.0, 1.0) == pytest.approx(silu(-9.0), rel=1e-6)  # no lower limit
    assert at(-200.0, 1.0) == 0.0


def test_combine_adds_in_the_order_of_the_experts() -> None:
    """In float32 the order shows: a large number first swallows the small ones."""
    partials = torch.tensor([[[2.0**24], [1.0], [1.0]], [[1.0], [1.0], [2.0**24]]])
    ones = torch.ones(2, 3)
    assert combine(partials, ones, torch.float32).flatten().tolist() == [2.0**24, 2.0**24 + 2]
    weighted = combine(partials, torch.tensor([[0.0, 2.0, 0.5], [0.5, 0.25, 0.0]]), torch.bfloat16)
    assert weighted.dtype == torch.bfloat16
    assert weighted.flatten().tolist() == [2.5, 0.75]


def test_combine_is_the_same_for_a_token_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    partials = torch.randn(40, 4, 96, generator=generator)
    weights = torch.rand(40, 4, generator=generator).bfloat16()
    together = combine(partials, weights, torch.float32)
    for t in range(40):
        assert same_bits(combine(partials[t : t + 1], weights[t : t + 1], torch.float32)[0], together[t])


def test_position_is_checked_on_this_machine(threads: int) -> None:
    """The fast way is taken where these tests run; if not, that is worth knowing, not an error of the results."""
    assert rowwise.position_free(256, 128, threads)


def test_a_blas_that_treats_rows_differently_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose last rows are summed in another order, as a kernel for the rows that do not fill a tile would."""

    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x @ weight.T
        out[6:] = x[6:, ::2] @ weight[:, ::2].T + x[6:, 1::2] @ weight[:, 1::2].T
        return out

    monkeypatch.setattr(rowwise, "linear", uneven)
    assert not rowwise.position_free.__wrapped__(64, 256, 1)
    monkeypatch.setattr(rowwise, "linear", lambda x, w: (x @ w.T) + x.abs().max() * 1e-3)  # neighbours show
    assert not rowwise.position_free.__wrapped__(64, 256, 1)
