"""Look-ahead inside captured graphs: whatever is guessed, and wherever it is called off, state and bits are equal."""

from __future__ import annotations

import pytest
import torch

from support.admissions import differences, random_calls
from support.admitted_layers import Admitted
from support.guesses import guesses_like
from support.layers import same_bits
from ziggurat.kernels.cpu.lookahead import choose
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.layer import CudaLayerKernels
from ziggurat.kernels.lookahead import (
    CHUNK_BYTES,
    FETCHED,
    GUESSED,
    MATCHED,
    MOST_TOKENS,
    USED,
    Lookahead,
    make_lookahead,
)

pytestmark = pytest.mark.gpu

#: hidden, intermediate, experts, top_k. Rows that arrive while a layer runs, and rows that do not.
SHORT = (256, 128, 16, 4)
LONG = (2048, 1024, 16, 4)
LAYERS = 3


def poisoned(given: Admitted) -> tuple[Lookahead, Lookahead]:
    """Ours and the twin's."""
    ours = make_lookahead(given.ours)
    ours.spare.fill_(0xFF)
    return ours, make_lookahead(given.twin)


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    ("codec", "sizes", "tokens", "slots"),
    [
        ("w2", SHORT, 1, 6),
        ("w2", LONG, 1, 6),
        ("w2", LONG, 1, 20),
        ("fp4", LONG, 1, 9),
        ("bf16", SHORT, 1, 6),
        ("w2", SHORT, 3, 13),
        ("w2", LONG, 8, 20),
        ("w2", SHORT, 16, 18),
        ("w2", SHORT, 40, 18),
    ],
)
def test_replays_that_look_ahead_are_those_of_a_full_pool(
    codec: str, sizes: tuple[int, int, int, int], tokens: int, slots: int, width: int
) -> None:
    steps, experts, top_k = 60, sizes[2], sizes[3]
    absent = range(5, LAYERS * experts, 9)
    given = Admitted.make(
        "cuda",
        codec,
        torch.bfloat16,
        sizes,
        layers=LAYERS,
        slots=slots,
        max_tokens=tokens,
        absent=absent,
    )
    device, generator = given.device, torch.Generator().manual_seed(width)
    ours, twin = poisoned(given)
    calls = random_calls(LAYERS, experts, top_k, tokens, steps, seed=slots)
    every_ids = torch.stack([one.ids for one in calls]).view(steps, LAYERS, tokens, top_k).to(device)
    every_live = torch.stack([one.live for one in calls]).view(steps, LAYERS)[:, :1].to(device)
    guesses = [guesses_like(one.ids, experts, width, generator) for one in calls]
    every_guess = torch.stack(guesses).view(steps, LAYERS, tokens, width).to(device)
    x, weights = given.inputs(tokens, 1)
    ids, live, ahead = every_ids[0].clone(), torch.zeros_like(every_live[0]), every_guess[0].clone()

    def launch() -> list[torch.Tensor]:
        return [
            given.launch(
                x,
                weights,
                ids[layer],
                live,
                None,
                layer,
                lookahead=ours,
                guesses=ahead[layer + 1] if layer + 1 < LAYERS else None,
            )
            for layer in range(LAYERS)
        ]

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = launch()
    got = []
    for step in range(steps):
        ids.copy_(every_ids[step])
        live.copy_(every_live[step])
        ahead.copy_(every_guess[step])
        graph.replay()
        got.append([out.clone() for out in outs])
    torch.cuda.synchronize()
    full = torch.arange(experts, dtype=torch.int32, device=device)
    assert isinstance(given.kernels, CudaLayerKernels)
    for number, one in enumerate(calls):
        step, layer = divmod(number, LAYERS)
        one = type(one)(one.layer, one.ids, one.live, None)
        given.follow(one)
        if layer + 1 < LAYERS and tokens <= MOST_TOKENS:
            choose(twin, given.twin, layer + 1, guesses[number + 1], one.live)
        here = torch.where(given.twin.table[layer].to(device) >= 0, full + layer * experts, -1)
        expected = given.kernels.run(
            x,
            weights,
            every_ids[step, layer],
            slots=here,
            pool=given.everything,
            live=every_live[step],
        )
        assert same_bits(got[step][layer], expected), (step, layer)
    assert differences(given.twin, given.ours) == []
    counted, wanted = ours.words.tolist(), twin.words.tolist()
    assert counted[GUESSED] == wanted[GUESSED]
    assert (counted[GUESSED] > 0) == (tokens <= MOST_TOKENS)
    chunks = -(-given.ours.pool.shape[1] // CHUNK_BYTES)
    assert 0 <= counted[USED] <= counted[FETCHED] <= counted[GUESSED] * chunks
    assert counted[MATCHED] <= counted[GUESSED]
    print(codec, sizes, tokens, width, counted[GUESSED:], "of", counted[GUESSED] * chunks, "chunks")


def test_rows_come_to_their_layer_by_way_of_spares() -> None:
    """With time between the layers every row that was guessed is there, and is used."""
    given = Admitted.make("cuda", "w2", torch.bfloat16, LONG, layers=LAYERS, slots=20, max_tokens=1)
    ours, _ = poisoned(given)
    calls = random_calls(LAYERS, LONG[2], LONG[3], 1, 12, seed=4)
    x, weights = given.inputs(1, 1)
    chunks = -(-given.ours.pool.shape[1] // CHUNK_BYTES)
    matched = 0
    for number, one in enumerate(calls):
        guesses = None
        if one.layer + 1 < LAYERS:
            guesses = calls[number + 1].ids.to(given.device)
        out = given.launch(
            x,
            weights,
            one.ids.to(given.device),
            one.live.to(given.device),
            None,
            one.layer,
            lookahead=ours,
            guesses=guesses,
        )
        torch.cuda.synchronize()
        one = type(one)(one.layer, one.ids, one.live, None)
        given.follow(one)
        assert differences(given.twin, given.ours) == []
        assert same_bits(out, given.expected(x, weights, one))
        if one.layer > 0 and int(calls[number - 1].live):
            matched += int(given.twin.state[3])
    words = ours.words.tolist()
    assert words[MATCHED] == matched > 0
    assert words[USED] == matched * chunks
    assert words[FETCHED] == words[GUESSED] * chunks


def test_a_layer_that_does_not_come_leaves_nothing_behind() -> None:
    """A pass that breaks off after its guesses, then others: with a capture in between."""
    given = Admitted.make("cuda", "w2", torch.bfloat16, LONG, layers=LAYERS, slots=20, max_tokens=1)
    assert isinstance(given.kernels, CudaLayerKernels)
    ours, _ = poisoned(given)
    x, weights = given.inputs(1, 1)
    live = torch.ones(1, dtype=torch.int32, device=given.device)
    ids = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32, device=given.device)

    def launch(layer: int, guesses: torch.Tensor | None) -> torch.Tensor:
        return given.launch(x, weights, ids, live, None, layer, lookahead=ours, guesses=guesses)

    launch(0, ids)
    given.kernels.settle()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = [launch(layer, ids if layer < 2 else None) for layer in range(LAYERS)]
    graph.replay()
    torch.cuda.synchronize()
    full = torch.arange(LONG[2], dtype=torch.int32, device=given.device)
    for layer, out in enumerate(outs):
        slots = full + layer * LONG[2]
        expected = given.kernels.run(x, weights, ids, slots=slots, pool=given.everything, live=live)
        assert same_bits(out, expected)


def test_guesses_of_a_wrong_shape_are_refused() -> None:
    given = Admitted.make("cuda", "w2", torch.bfloat16, SHORT, layers=LAYERS, slots=20, max_tokens=2)
    ours, _ = poisoned(given)
    x, weights = given.inputs(2, 1)
    live = torch.ones(1, dtype=torch.int32, device=given.device)
    ids = torch.zeros(2, 4, dtype=torch.int32, device=given.device)
    for shape in ((1, 4), (2, 17), (2, 0), (8,)):
        guesses = torch.zeros(shape, dtype=torch.int32, device=given.device)
        with pytest.raises(LayerError, match="expected 2 tokens with 1 to 16 each"):
            given.launch(x, weights, ids, live, None, 0, lookahead=ours, guesses=guesses)
    torch.cuda.synchronize()
    with pytest.raises(LayerError, match="only layers that are admitted look ahead"):
        given.kernels.run(
            x,
            weights,
            ids,
            slots=given.ours.table[0],
            pool=given.ours.pool,
            live=live,
            prefill=None,
            counts=None,
            tally=None,
            lookahead=ours,
        )
