"""What every implementation of LayerKernels promises, the CPU's and the CUDA one's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from support import layers
from support.layer_kernels import KINDS, TYPES, Subject, subject
from support.layers import Batch, same_bits

#: hidden, intermediate, experts, top_k. Both sizes leave groups of 128 k unfilled.
SMALL = (96, 160, 8, 3)
#: Many experts, few tokens for each.
FINE = (64, 32, 128, 4)

#: Relative error. Rounding hidden activations and the result to bfloat16 alone costs 2.3e-3 on average, to float16 an
#: eighth of that; a few numbers may be worse.
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 1e-3}

Make = Callable[..., Subject]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    """(codec, dtype, clamp, max_tokens, shape) -> a subject."""

    def made(
        codec: str = "w2",
        dtype: torch.dtype = torch.bfloat16,
        clamp: float | None = None,
        max_tokens: int = 64,
        shape: tuple[int, int, int, int] = SMALL,
    ) -> Subject:
        return subject(request.param, layers.random_layer(codec, *shape, clamp), dtype, max_tokens)

    return made


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("clamp", [None, 0.75])
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_numbers_are_those_of_float64(
    make: Make, codec: str, dtype: torch.dtype, clamp: float | None, outliers: bool
) -> None:
    given = make(codec, dtype, clamp, 128)
    for tokens in (1, 2, 7, 33, 128):
        batch = layers.random_batch(given.layer, tokens, dtype, seed=tokens, outliers=outliers)
        assert layers.relative_error(given.run(batch), layers.reference(given.layer, batch)) < LIMIT[dtype]


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_padding_rows_are_zero_and_what_they_hold_does_not_matter(
    make: Make, codec: str, dtype: torch.dtype
) -> None:
    given = make(codec, dtype)
    for tokens in (5, 64):
        batch = layers.random_batch(given.layer, tokens, dtype)
        full = given.run(batch)
        for live in (0, 1, 3, tokens - 1):
            x, weights, ids = batch.x.clone(), batch.weights.clone(), batch.ids.clone()
            x[live:], weights[live:] = math.nan, math.nan
            ids[live:] = torch.tensor([-7, 1 << 40, 3])
            counts = torch.full((SMALL[2], 2), 77, dtype=torch.int32, device=given.device)
            tally = torch.tensor([5, 6], dtype=torch.int32, device=given.device)
            out = given.run(Batch(x, weights, ids), live=live, counts=counts, tally=tally)
            assert same_bits(out[:live], full[:live])
            assert same_bits(out[live:], torch.zeros_like(out[live:]))
            expected, _ = layers.counted(batch.ids, SMALL[2], live, None, range(SMALL[2]))
            assert (counts.cpu().numpy() == 77 + expected).all()
            assert tally.tolist() == [5, 6]


@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [SMALL, FINE])
@pytest.mark.parametrize(("codec", "dtype"), [("w2", torch.bfloat16), ("bf16", torch.bfloat16)])
def test_missing_experts_and_foreign_ids_contribute_nothing_and_are_counted(
    make: Make, codec: str, dtype: torch.dtype, shape: tuple[int, int, int, int], ids_type: torch.dtype
) -> None:
    given = make(codec, dtype, max_tokens=300, shape=shape)
    E, k = shape[2:]
    generator = torch.Generator().manual_seed(5)
    for tokens in (1, 6, 64, 150, 300):
        batch = layers.random_batch(given.layer, tokens, dtype, seed=tokens)
        ids = torch.randint(-2, E + 2, (tokens, k), generator=generator)  # an expert may be chosen twice
        ids[0, 0] = torch.iinfo(ids_type).max
        ids[-1, -1] = torch.iinfo(ids_type).min
        batch = Batch(batch.x, batch.weights, ids.to(ids_type))
        prefill = torch.randint(0, 2, (tokens,), generator=generator).to(torch.uint8)
        for present in ([], [1], range(0, E, 3), range(E)):
            pool, slots = layers.placed(given.layer, given.device, order=present, slots=E)
            live = max(1, tokens - 2)
            counts = torch.full((E, 2), -1, dtype=torch.int32, device=given.device)
            tally = torch.tensor([100, 1000], dtype=torch.int32, device=given.device)
            out = given.run(
                batch, live=live, pool=pool, slots=slots, prefill=prefill, counts=counts, tally=tally
            )
            expected, pairs = layers.counted(ids, E, live, prefill, present)
            assert (counts.cpu().numpy() == expected - 1).all()
            assert tally.tolist() == [100 + pairs[0], 1000 + pairs[1]]
            right = layers.reference(given.layer, batch, present)[:live]
            assert (out[:live].double() - right).norm() <= LIMIT[dtype] * right.norm()
            assert same_bits(out[live:], torch.zeros_like(out[live:]))


def test_counts_and_tally_are_optional(make: Make) -> None:
    given = make()
    batch = layers.random_batch(given.layer, 6, torch.bfloat16)
    pool, slots = layers.placed(given.layer, given.device, order=[0, 3])
    counts = torch.zeros(SMALL[2], 2, dtype=torch.int32, device=given.device)
    tally = torch.zeros(2, dtype=torch.int32, device=given.device)
    with_both = given.run(batch, pool=pool, slots=slots, counts=counts, tally=tally)
    assert same_bits(given.run(batch, pool=pool, slots=slots), with_both)
    assert (counts[:, 0] == counts[:, 1]).all()  # without prefill, all tokens decode


def test_the_type_of_ids_and_weights_does_not_matter(make: Make) -> None:
    given = make()
    for tokens in (3, 64):
        batch = layers.random_batch(given.layer, tokens, torch.bfloat16)
        rounded = Batch(batch.x, batch.weights.bfloat16().float(), batch.ids)
        expected = given.run(rounded)
        assert same_bits(given.run(Batch(batch.x, batch.weights.bfloat16(), batch.ids.int())), expected)


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_a_token_has_the_same_bits_alone_and_anywhere_among_others(
    make: Make, codec: str, dtype: torch.dtype
) -> None:
    given = make(codec, dtype)
    token = layers.random_batch(given.layer, 1, dtype, seed=1)
    alone = given.run(token)
    assert alone.isfinite().all()
    crowd = layers.random_batch(given.layer, 16, dtype, seed=2, outliers=True)
    same_choice = Batch(crowd.x, crowd.weights, token.ids.expand(16, -1).contiguous())
    hostile = crowd.x.clone()
    hostile[0::3], hostile[1::3], hostile[2::3] = math.nan, math.inf, torch.finfo(dtype).max
    for others in (crowd, same_choice, Batch(hostile, same_choice.weights, same_choice.ids)):
        for place in range(16):
            x, weights, ids = others.x.clone(), others.weights.clone(), others.ids.clone()
            x[place], weights[place], ids[place] = token.x[0], token.weights[0], token.ids[0]
            assert same_bits(given.run(Batch(x, weights, ids))[place], alone[0])
            assert same_bits(given.run(Batch(x, weights, ids), live=place + 1)[place], alone[0])


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_slots_and_what_lies_in_the_others_do_not_matter(make: Make, codec: str, dtype: torch.dtype) -> None:
    given = make(codec, dtype)
    for tokens in (4, 64):
        batch = layers.random_batch(given.layer, tokens, dtype)
        expected = given.run(batch)
        for seed in range(4):
            pool, slots = layers.placed(given.layer, given.device, slots=8 + 5 * seed, seed=seed)
            assert same_bits(given.run(batch, pool=pool, slots=slots), expected)


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
@pytest.mark.parametrize("tokens", [1, 6, 16, 64])
def test_any_partition_into_chunks_gives_the_same_bits(
    make: Make, codec: str, dtype: torch.dtype, tokens: int
) -> None:
    given = make(codec, dtype)
    batch = layers.random_batch(given.layer, tokens, dtype)
    ids = batch.ids.clone()
    ids[-1, 0] = -1
    batch = Batch(batch.x, batch.weights, ids)
    expected = given.run(batch)
    for chunks in (
        [range(8)],
        [[7, 1, 4], [0, 2], [3, 5, 6]],
        [[e] for e in (5, 0, 7, 2, 1, 6, 3, 4)],
        [[], range(8)],
    ):
        assert same_bits(given.run_in_chunks(batch, chunks), expected)
    assert same_bits(given.run(batch), expected)
    live = tokens // 2
    assert same_bits(
        given.run_in_chunks(batch, [[0, 1, 2, 3], [4, 5, 6, 7]], live), given.run(batch, live=live)
    )
    pool, slots = layers.placed(given.layer, given.device, order=[1, 2, 6])
    assert same_bits(given.run_in_chunks(batch, [[2], [6, 1]]), given.run(batch, pool=pool, slots=slots))


def test_nothing_stays_from_one_layer_to_the_next(make: Make) -> None:
    given = make()
    for tokens in (5, 64):
        batch = layers.random_batch(given.layer, tokens, torch.bfloat16)
        expected = given.run(batch)
        poisoned = Batch(torch.full_like(batch.x, math.nan), batch.weights, batch.ids)
        given.run(poisoned)
        assert same_bits(given.run(batch), expected)
        given.run_in_chunks(poisoned, [range(8)])
        none = given.run_in_chunks(batch, [[]])
        assert same_bits(none, torch.zeros_like(none))
        assert same_bits(given.run_in_chunks(batch, [range(8)]), expected)


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_not_finite_keeps_to_itself(
    make: Make, codec: str, dtype: torch.dtype, bad: float
) -> None:
    given = make(codec, dtype)
    for tokens in (9, 64):
        batch = layers.random_batch(given.layer, tokens, dtype)
        expected = given.run(batch)
        x = batch.x.clone()
        x[4, 17] = bad
        out = given.run(Batch(x, batch.weights, batch.ids))
        assert out[4].isnan().any()
        keep = torch.arange(tokens) != 4
        assert same_bits(out[keep], expected[keep])


def test_a_weight_of_zero_and_repeated_runs(make: Make) -> None:
    given = make()
    batch = layers.random_batch(given.layer, 16, torch.bfloat16)
    zero = given.run(Batch(batch.x, torch.zeros_like(batch.weights), batch.ids))
    assert (zero == 0).all()
    first = given.run(batch)
    assert all(same_bits(given.run(batch), first) for _ in range(5))
