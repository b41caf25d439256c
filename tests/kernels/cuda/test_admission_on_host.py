"""Admission in the route kernel, compiled for the CPU, against its twin: bit for bit, in any order of threads."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from support.admissions import Call, copied, differences, over_rows, pattern_rows, random_calls
from support.host_cuda import HostLayer
from ziggurat.kernels.admission import WITHHELD, Admission
from ziggurat.kernels.cpu.admission import admit, copy_rows

STRIDE = 80  # five vectors of 16 bytes


def check_entries(layer: HostLayer, one: Call, before: torch.Tensor, slots: torch.Tensor, most: int) -> None:
    """Every live pair whose expert has a slot is in one entry; those whose rows were there come first."""
    entries, resident = layer.entries()
    chosen = one.ids.flatten().tolist()
    alive = int(one.live) * layer.top_k
    pairs = layer.memory["pairs"].view(-1, 2)
    seen: list[int] = []
    for number, (slot, begin, count, expert) in enumerate(entries):
        assert slot == slots[expert]
        assert 1 <= count <= most
        assert (before[expert] >= 0) == (number < resident)
        for pair, token in pairs[begin : begin + count].tolist():
            assert token == pair // layer.top_k
            assert chosen[pair] == expert
            seen.append(pair)
    wanted = [i for i in range(alive) if 0 <= chosen[i] < layer.experts and slots[chosen[i]] >= 0]
    assert sorted(seen) == wanted
    done = [int(i in set(wanted)) for i in range(len(chosen))]
    assert layer.memory["done"][: len(chosen)].tolist() == done
    assert (layer.memory["hidden_amax"][: len(chosen)] == 0).all()
    full = Counter(chosen[i] for i in wanted)
    assert len(entries) == sum(-(-n // most) for n in full.values())


def follow(a: Admission, calls: list[Call], top_k: int, *, large: bool = False, most: int = 8) -> int:
    """Both over all calls; returns how many rows were copied."""
    b = copied(a)
    layer = HostLayer(a.experts, top_k, len(calls[0].ids), a.pool.shape[1])
    moved = 0
    tally, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(a.experts, 2, dtype=torch.int32)
    routed, told = torch.zeros(a.experts, dtype=torch.int64), [0, 0, 0]
    for number, one in enumerate(calls):
        before = a.table[one.layer].clone()
        admit(a, one.layer, one.ids, one.live, one.prefill)
        copy_rows(a)
        layer.run(
            b,
            one.layer,
            one.ids.long() if number % 2 else one.ids,
            one.live,
            one.prefill,
            tally=tally,
            counts=counts,
            large=large,
            order=number,
            entry_pairs=most,
        )
        assert differences(a, b) == []
        slots = a.table[one.layer]
        check_entries(layer, one, before, slots, most)
        chosen = one.ids[: int(one.live)].flatten()
        valid = chosen[(chosen >= 0) & (chosen < a.experts)].long()
        now = [int((slots[valid] < 0).sum()), len(chosen) - len(valid), int((before[valid] < 0).sum())]
        told = [sum(both) for both in zip(told, now, strict=True)]
        assert tally.tolist() == told
        routed += torch.bincount(valid, minlength=a.experts)
        assert torch.equal(counts[:, 0].long(), routed)
        moved += int(a.state[3])
    return moved


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "tokens", "slots"),
    [
        (3, 40, 4, 8, 44),
        (2, 40, 4, 8, 32),
        (2, 70, 5, 10, 50),
        (2, 8, 3, 6, 8),
        (2, 8, 3, 6, 5),
        (1, 33, 2, 3, 1),
        (2, 300, 8, 32, 256),
    ],
)
def test_small_routes_admit_as_the_twin_does(
    layers: int, experts: int, top_k: int, tokens: int, slots: int
) -> None:
    keys = layers * experts
    a = over_rows(pattern_rows(keys, STRIDE), layers, slots, absent=range(3, keys, 11), first=layers - 1)
    calls = random_calls(layers, experts, top_k, tokens, 12 // layers, seed=slots, first=0)
    assert follow(a, calls, top_k) > 0


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "slots", "most"),
    [(40, 4, 100, 44, 8), (130, 3, 120, 60, 64), (8, 2, 300, 9, 64)],
)
def test_large_routes_admit_as_the_twin_does(
    experts: int, top_k: int, tokens: int, slots: int, most: int
) -> None:
    a = over_rows(
        pattern_rows(2 * experts, STRIDE), 2, slots, absent=range(3, 2 * experts, 11), log_events=32
    )
    assert follow(a, random_calls(2, experts, top_k, tokens, 3, seed=slots), top_k, large=True, most=most) > 0


@pytest.mark.parametrize("vectors", [511, 512, 513, 1281, 24 * 512 + 7])
def test_rows_of_several_chunks_arrive_and_nothing_beside_them(vectors: int) -> None:
    """Chunks of 512 vectors, 24 blocks: fewer chunks than blocks, and more."""
    a = over_rows(pattern_rows(16, vectors * 16), 2, 9)
    assert follow(a, random_calls(2, 8, 3, 2, 2, seed=vectors), 3) > 3


@pytest.mark.parametrize("large", [False, True])
def test_one_token_admits_as_the_twin_does(large: bool) -> None:
    a = over_rows(pattern_rows(2 * 40, STRIDE), 2, 12, absent=range(3, 80, 11))
    calls = random_calls(2, 40, 6, 1, 4 if large else 12, seed=5)
    assert follow(a, calls, 6, large=large) > 0


def test_withheld_slots_and_rising_heat() -> None:
    a = over_rows(pattern_rows(40, STRIDE), 2, 24)
    a.owners[::3] = WITHHELD
    a.heat[:] = torch.arange(40, dtype=torch.int32) * 7_000_000
    a.last[:] = -torch.arange(40, dtype=torch.int32) * 211
    a.state[0] = (1 << 31) - 3
    a.heat[4] = (1 << 31) - 1
    a.state[2] = -2
    assert follow(a, random_calls(2, 20, 4, 3, 8, seed=1), 4) > 0


def test_layers_whose_slots_the_host_decides_list_their_work_as_before() -> None:
    layer = HostLayer(40, 4, 20, STRIDE)
    for number, one in enumerate(random_calls(1, 40, 4, 20, 4, seed=3)):
        slots = torch.where(torch.arange(40) % 3 == 0, -1, torch.arange(40)).int()
        for large in (False, True):
            tally = torch.zeros(2, dtype=torch.int32)
            layer.run(
                None, 0, one.ids, one.live, one.prefill, slots=slots, tally=tally, large=large, order=number
            )
            check_entries(layer, one, slots, slots, 8)
            entries, resident = layer.entries()
            assert resident == len(entries)
            chosen = one.ids[: int(one.live)].flatten()
            valid = chosen[(chosen >= 0) & (chosen < 40)].long()
            assert tally.tolist() == [int((slots[valid] < 0).sum()), len(chosen) - len(valid)]
