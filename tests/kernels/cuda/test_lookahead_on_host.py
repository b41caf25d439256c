"""Look-ahead in the kernels, compiled for the CPU, against its twin; and fetches that stop anywhere."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

from support.admissions import copied, differences, over_rows, pattern_rows, random_calls
from support.guesses import guesses_like
from support.host_cuda import HostGuesses, HostLayer
from ziggurat.kernels.admission import Admission
from ziggurat.kernels.cpu.admission import admit
from ziggurat.kernels.cpu.lookahead import choose, copy_rows_ahead, fetch
from ziggurat.kernels.cuda.admission import GATHER_BLOCKS
from ziggurat.kernels.lookahead import (
    CALLED_OFF,
    COUNT,
    FETCHED,
    GUESSED,
    MATCHED,
    SPARES,
    USED,
    VALID,
    Lookahead,
    make_lookahead,
)

CHUNK = 512 * 16  # bytes, with the threads that the test's blocks have
AGREED = [COUNT, VALID, CALLED_OFF, GUESSED, MATCHED]


def poisoned(a: Admission) -> Lookahead:
    made = make_lookahead(a)
    made.spare.fill_(0xFF)
    return made


def copy_of(lookahead: Lookahead) -> Lookahead:
    return Lookahead(*(getattr(lookahead, f.name).clone() for f in fields(lookahead)))


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "width", "slots"),
    [(40, 4, 1, 3, 44), (40, 4, 8, 4, 60), (12, 3, 16, 16, 20), (300, 8, 5, 1, 90)],
)
def test_the_choice_is_the_twins_in_any_order_of_threads(
    experts: int, top_k: int, tokens: int, width: int, slots: int
) -> None:
    a = over_rows(pattern_rows(2 * experts, 80), 2, slots, absent=range(3, 2 * experts, 11))
    generator = torch.Generator().manual_seed(slots)
    twin, ours = poisoned(a), poisoned(a)
    chosen = 0
    for number, one in enumerate(random_calls(2, experts, top_k, tokens, 12, seed=slots)):
        admit(a, one.layer, one.ids, one.live, one.prefill)
        ids = torch.randint(-2, experts + 2, (tokens, width), generator=generator)
        ids = ids if number % 2 else ids.int()
        ours.progress.fill_(77)
        choose(twin, a, 1 - one.layer, ids, one.live)
        HostGuesses(ours, a, 1 - one.layer, ids, one.live).choose(order=number)
        assert torch.equal(ours.words, twin.words)
        count = int(twin.words[COUNT])
        assert torch.equal(ours.rows[:count], twin.rows[:count])
        assert (ours.progress == 0).all()
        chosen += count
    assert chosen > 12


@pytest.mark.parametrize("vectors", [5, 511, 513, 3 * 512 + 1, 24 * 512 + 7, 50 * 512])
@pytest.mark.parametrize("tokens", [1, 6])
def test_rows_are_whole_wherever_the_fetch_was_called_off(vectors: int, tokens: int) -> None:
    """Spares hold garbage beyond what was claimed; blocks are stopped at chunks of their own."""
    experts, top_k = 16, 3
    rnd, generator = random.Random(vectors), torch.Generator().manual_seed(vectors)
    # Every 16 bytes of a row tell its key and where they are.
    rows = torch.arange(2 * experts * vectors * 4, dtype=torch.int32).view(2 * experts, -1).view(torch.uint8)
    a = over_rows(rows, 2, top_k * tokens + 2, absent=[5, 20])
    b = copied(a)
    twin, ours = poisoned(a), poisoned(a)
    layer = HostLayer(experts, top_k, tokens, a.pool.shape[1])
    calls = random_calls(2, experts, top_k, tokens, 8, seed=vectors)
    for number, one in enumerate(calls):
        admit(a, one.layer, one.ids, one.live, one.prefill)
        copy_rows_ahead(twin, a, one.layer)
        layer.run(b, one.layer, one.ids, one.live, one.prefill, lookahead=ours)
        assert differences(a, b) == [], number
        assert torch.equal(ours.words[AGREED], twin.words[AGREED])
        if number + 1 == len(calls):
            break
        ahead = calls[number + 1]
        ids = guesses_like(ahead.ids, experts, 4, generator)
        choose(twin, a, ahead.layer, ids, one.live)
        fetch(twin, a)
        guess = HostGuesses(ours, b, ahead.layer, ids, one.live)
        guess.choose()
        blocks = sorted(rnd.sample(range(GATHER_BLOCKS + 1), 2)) if number % 3 else [0, GATHER_BLOCKS]
        ours.spare.fill_(0xFF)
        guess.fetch(*blocks)
        if number % 2:
            stop_early(ours, rnd)
        assert int(twin.words[COUNT]) <= SPARES
    assert int(ours.words[MATCHED]) > 2
    assert int(ours.words[USED]) > 0
    assert int(ours.words[USED]) <= int(ours.words[FETCHED])


def stop_early(lookahead: Lookahead, rnd: random.Random) -> None:
    """As if blocks had been called off before some of the chunks that they have brought."""
    begun, done = lookahead.progress
    assert torch.equal(begun, done)
    for spare in range(SPARES):
        for block in range(GATHER_BLOCKS):
            had = int(begun[spare, block])
            kept = rnd.randint(0, had)
            begun[spare, block] = done[spare, block] = kept
            for chunk in range(kept, had):
                first = (block + chunk * GATHER_BLOCKS) * CHUNK
                lookahead.spare[spare, first : first + CHUNK] = 0xFF


def test_a_layer_that_has_copied_its_rows_stops_every_block() -> None:
    a = over_rows(pattern_rows(32, 30 * CHUNK), 2, 20)
    ours = poisoned(a)
    layer = HostLayer(16, 3, 1, a.pool.shape[1])
    live = torch.ones(1, dtype=torch.int32)
    layer.run(a, 0, torch.tensor([[1, 2, 3]], dtype=torch.int32), live, None, lookahead=ours)
    guess = HostGuesses(ours, a, 1, torch.tensor([[7, 8, 9, 10]]), live)
    guess.choose()
    ours.words[CALLED_OFF] = -1
    fetched = int(ours.words[FETCHED])
    guess.fetch(0, 2)
    assert int(ours.words[FETCHED]) == fetched + 2 * 4 * 2
    layer.run(a, 1, torch.tensor([[0, 8, 4]], dtype=torch.int32), live, None, lookahead=ours)
    assert int(ours.words[MATCHED]) == 1
    assert int(ours.words[USED]) == 2 * 2
    guess.fetch(0, 24)  # its tag is called off
    assert int(ours.words[FETCHED]) == fetched + 2 * 4 * 2
    ours.words[CALLED_OFF] = -1
    guess.fetch(0, 24)  # and so is every claim
    assert int(ours.words[FETCHED]) == fetched + 2 * 4 * 2
    for expert in (0, 4, 8):
        row = a.pool[int(a.table[1, expert])].view(torch.int32)
        assert (row == 16 + expert).all()


@pytest.mark.parametrize("stale", ["pass", "layer", "never"])
def test_guesses_of_another_pass_or_layer_are_not_looked_at(stale: str) -> None:
    """Their spares hold what lay in those places then."""
    a = over_rows(pattern_rows(32, 3 * CHUNK), 2, 20)
    ours = poisoned(a)
    layer = HostLayer(16, 2, 1, a.pool.shape[1])
    live = torch.ones(1, dtype=torch.int32)

    def run(number: int, first: int, second: int) -> None:
        ids = torch.tensor([[first, second]], dtype=torch.int32)
        layer.run(a, number, ids, live, None, lookahead=ours)

    run(0, 1, 2)
    if stale != "never":
        guess = HostGuesses(ours, a, 1 if stale == "pass" else 0, torch.tensor([[7]]), live)
        guess.choose()
        guess.fetch()
    if stale == "pass":
        run(0, 3, 4)
    ours.spare.fill_(0xEE)
    place = int(a.places[7 if stale == "layer" else 16 + 7])
    run(1, 7, 8)
    assert int(ours.words[MATCHED]) == int(ours.words[USED]) == 0
    assert (a.pool[int(a.table[1, 7])] == a.arena[int(a.places[16 + 7])]).all()
    assert place in ours.rows[:, 0].tolist() or stale == "never"
