"""Layers that admit their own experts inside captured graphs, with the host far away, and while it moves rows about.

What every implementation promises of single calls is in tests/kernels/test_admitted_layer.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.admissions import Call, differences, random_calls
from support.admitted_layers import Admitted
from support.layers import same_bits
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.layer import CudaLayerKernels

pytestmark = pytest.mark.gpu

#: hidden, intermediate, experts, top_k. Rows of half a megabyte and more, which take a while to arrive.
WIDE = (1024, 512, 16, 4)
#: So much work for one token that blocks have several units.
LONG = (256, 4096, 12, 8)
LAYERS = 2


def kernels_of(given: Admitted) -> CudaLayerKernels:
    assert isinstance(given.kernels, CudaLayerKernels)
    return given.kernels


@pytest.mark.parametrize(
    ("codec", "dtype", "sizes", "tokens", "slots"),
    [
        ("w2", torch.bfloat16, WIDE, 1, 5),
        ("w2", torch.bfloat16, WIDE, 1, 20),
        ("fp4", torch.float16, WIDE, 1, 6),
        ("bf16", torch.bfloat16, WIDE, 1, 6),
        ("w2", torch.bfloat16, LONG, 1, 9),
        ("w2", torch.bfloat16, WIDE, 3, 13),
        ("bf16", torch.bfloat16, WIDE, 8, 17),
        ("fp4", torch.bfloat16, WIDE, 8, 24),
        ("w2", torch.float16, WIDE, 48, 18),
    ],
)
def test_replays_without_the_host_are_those_of_a_full_pool(
    codec: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], tokens: int, slots: int
) -> None:
    """Pools that hardly hold one layer's set, so that nearly every layer takes slots of the other one, whose rows are
    other experts: a GEMM that reads one too early has other bits."""
    steps = 60
    given = Admitted.make("cuda", codec, dtype, sizes, layers=LAYERS, slots=slots, max_tokens=tokens)
    device = given.device
    calls = random_calls(LAYERS, sizes[2], sizes[3], tokens, steps, seed=slots)
    every_ids = torch.stack([one.ids for one in calls]).view(steps, LAYERS, tokens, sizes[3]).to(device)
    every_live = torch.stack([one.live for one in calls]).view(steps, LAYERS)[:, :1].to(device)
    flags = [calls[step * LAYERS].prefill for step in range(steps)]
    every_flag = torch.stack([torch.zeros(tokens).byte() if f is None else f for f in flags]).to(device)
    x, weights = given.inputs(tokens, 1)
    ids, live, flag = every_ids[0].clone(), torch.zeros_like(every_live[0]), every_flag[0].clone()
    tally = torch.zeros(3, dtype=torch.int32, device=device)

    def launch() -> list[torch.Tensor]:
        return [given.launch(x, weights, ids[layer], live, flag, layer, tally) for layer in range(LAYERS)]

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = launch()
    got = []
    for step in range(steps):
        ids.copy_(every_ids[step])
        live.copy_(every_live[step])
        flag.copy_(every_flag[step])
        graph.replay()
        got.append([out.clone() for out in outs])
    torch.cuda.synchronize()
    moved = 0
    for one in calls:
        given.follow(one)
        moved += int(given.twin.state[3])
    assert moved > steps // 2
    assert differences(given.twin, given.ours) == []
    assert int(tally[0]) == 0
    full = torch.arange(sizes[2], dtype=torch.int32, device=device)
    for number in range(len(calls)):
        step, layer = divmod(number, LAYERS)
        expected = kernels_of(given).run(
            x,
            weights,
            every_ids[step, layer],
            slots=full + layer * sizes[2],
            pool=given.everything,
            live=every_live[step],
        )
        assert same_bits(got[step][layer], expected), (step, layer)


def move_a_row(given: Admitted, key: int, other: int) -> None:
    """Two rows change places in the arena, and both sides are told."""
    for a in (given.ours, given.twin):
        mine, theirs = int(given.twin.places[key]), int(given.twin.places[other])
        kept = a.arena[mine].clone()
        a.arena[mine] = a.arena[theirs]
        a.arena[theirs] = kept
    given.twin.places[key], given.twin.places[other] = theirs, mine
    given.ours.places.copy_(given.twin.places)


@pytest.mark.parametrize("tokens", [1, 4])
def test_rows_that_the_host_moved_are_read_where_they_are_now(tokens: int) -> None:
    given = Admitted.make("cuda", "w2", torch.bfloat16, WIDE, layers=LAYERS, slots=18, max_tokens=tokens)
    generator = torch.Generator().manual_seed(tokens)
    for number, one in enumerate(random_calls(LAYERS, WIDE[2], WIDE[3], tokens, 20, seed=tokens)):
        torch.cuda.synchronize()
        pair = torch.randperm(LAYERS * WIDE[2], generator=generator)[:2].tolist()
        move_a_row(given, *pair)
        x, weights = given.inputs(tokens, number)
        out = given.launch(x, weights, one.ids.cuda(), one.live.cuda(), None, one.layer)
        given.follow(Call(one.layer, one.ids, one.live, None))
        assert differences(given.twin, given.ours) == []
        assert same_bits(out, given.expected(x, weights, one))


def test_admitted_layers_and_others_take_turns() -> None:
    """The same kernels, with and without an admission, in chunks, and another admission."""
    first = Admitted.make("cuda", "w2", torch.bfloat16, WIDE, layers=LAYERS, slots=17, max_tokens=6)
    second = Admitted.make("cuda", "w2", torch.bfloat16, WIDE, layers=LAYERS, slots=20, max_tokens=6)
    second.kernels = first.kernels
    for number, one in enumerate(random_calls(LAYERS, WIDE[2], WIDE[3], 6, 6, seed=2)):
        for given in (first, second, first):
            for tokens in (1, 6):
                part = Call(one.layer, one.ids[:tokens], one.live.clamp(max=tokens), None)
                x, weights = given.inputs(tokens, number)
                out = given.launch(x, weights, part.ids.cuda(), part.live.cuda(), None, part.layer)
                given.follow(part)
                assert differences(given.twin, given.ours) == []
                assert same_bits(out, given.expected(x, weights, part))
                ids, live = part.ids.cuda(), part.live.cuda()
                slots = given.ours.table[part.layer]
                given.kernels.begin(x, ids, live)
                given.kernels.add(x, ids, live, slots=slots, pool=given.ours.pool)
                assert same_bits(out, given.kernels.finish(x, weights, ids, live))


def test_what_cannot_be_admitted_is_refused() -> None:
    given = Admitted.make("cuda", "w2", torch.bfloat16, WIDE, layers=LAYERS, slots=17, max_tokens=300)
    kernels = kernels_of(given)
    one, *_ = random_calls(LAYERS, WIDE[2], WIDE[3], 4, 1, seed=2)
    x, weights = given.inputs(4, 0)
    ids, live = one.ids.cuda(), one.live.cuda()
    for slots, pool in (
        (given.ours.table[0], given.ours.pool),
        (given.ours.table[1], given.everything),
    ):
        with pytest.raises(LayerError, match="not those of the admission's layer 1"):
            kernels.run(x, weights, ids, slots=slots, pool=pool, live=live, admission=given.ours, layer=1)
    kernels.part_tokens = 3
    with pytest.raises(LayerError, match="4 tokens in an admitted layer: the workspace holds 3"):
        given.launch(x, weights, ids, live, None, 0)
    kernels.part_tokens = 300
    pageable = replace(given.ours, arena=given.twin.arena)
    with pytest.raises(LayerError, match="the arena is not mapped for devices"):
        kernels.run(
            x,
            weights,
            ids,
            slots=pageable.table[0],
            pool=pageable.pool,
            live=live,
            admission=pageable,
            layer=0,
        )
    torch.cuda.synchronize()
    assert (given.ours.table == -1).all()
