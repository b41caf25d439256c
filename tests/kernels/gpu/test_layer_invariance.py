"""What must not show in a result of the CUDA kernels: neighbours, places, slots, and whether a graph was replayed."""

from __future__ import annotations

import math

import pytest
import torch

from support import layers
from support.layer_kernels import TYPES, Subject, subject
from support.layers import Batch, same_bits
from ziggurat.kernels.cuda.layer import CudaLayerKernels

pytestmark = pytest.mark.gpu

#: "fine": so many experts that a batch too large for the small list still has few tokens for each.
SHAPES = {
    "demo": (256, 128, 32, 4),
    "odd": (96, 160, 8, 3),
    "fine": (128, 96, 128, 4),
    "deepseek-v4-flash": (4096, 2048, 16, 6),
}


def given(codec: str, dtype: torch.dtype, shape: str, max_tokens: int = 512) -> Subject:
    return subject("cuda", layers.random_layer(codec, *SHAPES[shape]), dtype, max_tokens)


def decode_tokens(found: Subject) -> int:
    """Batches up to this size go to the kernels for few tokens, larger ones to those for many."""
    assert isinstance(found.kernels, CudaLayerKernels)
    return found.kernels._decode_tokens


def put(batch: Batch, place: int, token: Batch) -> Batch:
    x, weights, ids = batch.x.clone(), batch.weights.clone(), batch.ids.clone()
    x[place], weights[place], ids[place] = token.x[0], token.weights[0], token.ids[0]
    return Batch(x, weights, ids)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_decode_alone_and_at_every_place_of_sixteen(codec: str, dtype: torch.dtype, shape: str) -> None:
    found = given(codec, dtype, shape)
    assert decode_tokens(found) >= 16
    token = layers.random_batch(found.layer, 1, dtype, seed=3)
    alone = found.run(token)
    assert alone.isfinite().all()
    crowds = [layers.random_batch(found.layer, 16, dtype, seed=4, outliers=True)]
    crowds.append(
        Batch(crowds[0].x, crowds[0].weights, token.ids.expand(16, -1).contiguous())
    )  # all want its experts
    crowds.append(Batch(torch.full_like(crowds[0].x, math.nan), crowds[1].weights, crowds[1].ids))
    pool, slots = layers.placed(found.layer, found.device, slots=found.layer.experts + 9, seed=8)
    for crowd in crowds:
        for place in range(16):
            batch = put(crowd, place, token)
            assert same_bits(found.run(batch)[place], alone[0])
            assert same_bits(found.run(batch, pool=pool, slots=slots, live=place + 1)[place], alone[0])
    for size in (2, 7, decode_tokens(found)):
        batch = put(layers.random_batch(found.layer, size, dtype, seed=size), size - 1, token)
        assert same_bits(found.run(batch)[size - 1], alone[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_prefill_at_any_place_of_any_batch(codec: str, dtype: torch.dtype, shape: str) -> None:
    found = given(codec, dtype, shape)
    fewest = decode_tokens(found) + 1
    token = layers.random_batch(found.layer, 1, dtype, seed=5)
    crowd = layers.random_batch(found.layer, 300, dtype, seed=6, outliers=True)
    alike = Batch(crowd.x, crowd.weights, token.ids.expand(300, -1).contiguous())
    hostile = Batch(torch.full_like(crowd.x, math.nan), alike.weights, alike.ids)
    alone = found.run(put(hostile.pick(range(fewest)), 0, token), live=1)[0]
    assert alone.isfinite().all()
    for others in (crowd, alike, hostile):
        for size, place in ((fewest, fewest - 1), (257, 0), (257, 63), (257, 64), (257, 200), (300, 299)):
            batch = put(others.pick(range(size)), place, token)
            assert same_bits(found.run(batch)[place], alone)
            assert same_bits(found.run(batch, live=place + 1)[place], alone)


@pytest.mark.parametrize("shape", ["demo", "deepseek-v4-flash"])
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_chunks_of_experts_are_the_whole_layer(codec: str, dtype: torch.dtype, shape: str) -> None:
    found = given(codec, dtype, shape)
    E = found.layer.experts
    order = torch.randperm(E, generator=torch.Generator().manual_seed(1)).tolist()
    for tokens in (1, 5, 16, 200):
        batch = layers.random_batch(found.layer, tokens, dtype, seed=tokens)
        expected = found.run(batch)
        for size in (3, 7, E):
            chunks = [order[start : start + size] for start in range(0, E, size)]
            assert same_bits(found.run_in_chunks(batch, chunks), expected)


@pytest.mark.parametrize("tokens", [1, 4, 16, 33, 128])
@pytest.mark.parametrize(("codec", "dtype"), [*TYPES[:1], *TYPES[3:]])
def test_a_replayed_graph_is_the_eager_call(codec: str, dtype: torch.dtype, tokens: int) -> None:
    """Captured unarmed (live = 0), replayed with other tokens, ids, slots and rows."""
    found = given(codec, dtype, "demo")
    layer, device = found.layer, found.device
    E, k = layer.experts, layer.top_k
    x = torch.zeros(tokens, layer.geometry.hidden, dtype=dtype, device=device)
    weights = torch.zeros(tokens, k, device=device)
    ids = torch.zeros(tokens, k, dtype=torch.int32, device=device)
    pool, slots = layers.placed(layer, device, slots=E + 3)
    live = found.live(0)
    prefill = torch.zeros(tokens, dtype=torch.uint8, device=device)
    counts = torch.zeros(E, 2, dtype=torch.int32, device=device)
    tally = torch.zeros(2, dtype=torch.int32, device=device)

    def launch() -> torch.Tensor:
        return found.kernels.run(
            x, weights, ids, slots=slots, pool=pool, live=live, prefill=prefill, counts=counts, tally=tally
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
        twice = launch()  # a second layer of the same graph shares the workspace
    for step in range(6):
        batch = layers.random_batch(layer, tokens, dtype, seed=40 + step)
        chosen = batch.ids.int()
        chosen[0, 0] = -1 if step == 3 else chosen[0, 0]
        x.copy_(batch.x)
        weights.copy_(batch.weights)
        ids.copy_(chosen)
        many = tokens if step % 2 == 0 else tokens - tokens // 3
        live.fill_(many)
        present = range(E) if step < 4 else range(step, E, 2)
        new_pool, new_slots = layers.placed(layer, device, order=present, slots=E + 3, seed=step)
        pool.copy_(new_pool)
        slots.copy_(new_slots)
        mask = (torch.arange(tokens) % 2 == step % 2).to(torch.uint8)
        prefill.copy_(mask)
        tally.zero_()
        counts.zero_()
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        same_ids = Batch(batch.x, batch.weights, chosen)
        eager = found.run(same_ids, live=many, pool=new_pool, slots=new_slots)
        assert same_bits(out.cpu(), eager)
        assert same_bits(twice.cpu(), eager)
        assert same_bits(eager[many:], torch.zeros_like(eager[many:]))
        expected, pairs = layers.counted(chosen, E, many, mask, present)
        assert (counts.cpu().numpy() == 2 * expected).all()
        assert tally.tolist() == [2 * pairs[0], 2 * pairs[1]]


@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_runs_repeat_to_the_bit(tokens: int) -> None:
    """Thirty times each, behind work of different lengths, which shifts what runs beside what."""
    for codec, dtype in TYPES:
        found = given(codec, dtype, "demo")
        batch = layers.random_batch(found.layer, tokens, dtype, outliers=True)
        expected = found.run(batch)
        noise = torch.randn(512, 512, device=found.device)
        for turn in range(30):
            for _ in range(turn % 4):
                noise = noise @ noise * 1e-3
            assert same_bits(found.run(batch), expected)
