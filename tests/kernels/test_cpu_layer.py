"""The CPU's stand-in for device kernels keeps their contract: padding, missing experts, counts, portions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.admissions import over_rows
from ziggurat.kernels.admission import COPIES, Admission
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.cpu.layer import CpuLayerKernels
from ziggurat.kernels.cpu.moe import combine, expert_ffn
from ziggurat.kernels.errors import CodecError
from ziggurat.kernels.geometry import ExpertGeometry

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 5, 3, 64, 32, 7
SIZES = ExpertGeometry(HIDDEN, INTERMEDIATE)
CODEC = get_codec("bf16")
CLAMP = 0.4
SLOT_OF = [4, 0, 5, 2, 1]  # of six slots; slot 3 holds no row


class Layer:
    """A pool with one layer's experts, and a batch for it."""

    def __init__(self, ids_dtype: torch.dtype = torch.int32) -> None:
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn(EXPERTS, CODEC.row_bytes(SIZES) // 2, generator=generator).bfloat16() * 0.3
        self.pool = torch.full((6, CODEC.row_bytes(SIZES)), 0xFF, dtype=torch.uint8)  # NaN
        self.pool[SLOT_OF] = rows.view(torch.uint8)
        self.slots = torch.tensor(SLOT_OF, dtype=torch.int32)
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        self.weights = torch.rand(TOKENS, TOP_K, generator=generator)
        self.ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator).to(ids_dtype)
        self.counts = torch.zeros(EXPERTS, 2, dtype=torch.int32)
        self.tally = torch.tensor([10, 20, 30], dtype=torch.int32)
        self.kernels = CpuLayerKernels(CODEC, SIZES, EXPERTS, TOP_K, clamp=CLAMP)

    def run(self, live: int = TOKENS, **changes: Any) -> torch.Tensor:
        arguments = {
            "slots": self.slots,
            "pool": self.pool,
            "live": torch.tensor([live], dtype=torch.int32),
            "prefill": None,
            "counts": self.counts,
            "tally": self.tally,
        }
        return self.kernels.run(self.x, self.weights, self.ids, **{**arguments, **changes})

    def expected(self, live: int = TOKENS, left_out: frozenset[int] = frozenset()) -> torch.Tensor:
        """One token and one choice at a time."""
        out = torch.zeros_like(self.x)
        for token in range(live):
            partials = torch.zeros(1, TOP_K, HIDDEN)
            for j, expert in enumerate(self.ids[token].tolist()):
                if 0 <= expert < EXPERTS and expert not in left_out:
                    decoded = CODEC.decode(self.pool[SLOT_OF[expert]], SIZES)
                    partials[0, j] = expert_ffn(self.x[token : token + 1], decoded, clamp=CLAMP)[0]
            out[token] = combine(partials, self.weights[token : token + 1], self.x.dtype)[0]
        return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("live", [TOKENS, 3, 0])
def test_a_layer_with_padding(live: int, ids_dtype: torch.dtype) -> None:
    layer = Layer(ids_dtype)
    layer.x[live:] = float("nan")
    layer.ids[live:] = -5
    assert same_bits(layer.run(live), layer.expected(live))
    routed = torch.bincount(layer.ids[:live].flatten().long(), minlength=EXPERTS)
    assert torch.equal(layer.counts, torch.stack([routed, routed], dim=1).int())
    assert layer.tally.tolist() == [10, 20, 30]


def test_missing_experts_and_ids_that_are_none() -> None:
    layer = Layer()
    layer.ids[0] = torch.tensor([1, EXPERTS, 3])
    layer.ids[1] = torch.tensor([-1, 3, 3])
    layer.slots[3] = -1
    assert same_bits(layer.run(), layer.expected(left_out=frozenset({3})))
    missing = int((layer.ids == 3).sum())
    assert missing > 2
    assert layer.tally.tolist() == [10 + missing, 20 + 2, 30], "the last one is of admissions"
    assert int(layer.counts[3, 0]) == missing
    assert int(layer.counts[:, 0].sum()) == TOKENS * TOP_K - 2


def test_prompts_are_counted_apart() -> None:
    layer = Layer()
    prefill = torch.tensor([1, 0, 1, 1, 0, 0, 1, 9, 9], dtype=torch.uint8)
    layer.run(5, prefill=prefill)
    assert torch.equal(
        layer.counts[:, 1].long(), torch.bincount(layer.ids[[1, 4]].flatten().long(), minlength=EXPERTS)
    )
    assert int(layer.counts[:, 0].sum()) == 5 * TOP_K


@pytest.mark.parametrize("portions", [[[0, 1, 2, 3, 4]], [[2], [0, 4], [1, 3]], [[4, 3], [], [2, 1, 0]]])
def test_portions_give_the_bits_of_the_whole(portions: list[list[int]]) -> None:
    layer = Layer()
    live = torch.tensor([6], dtype=torch.int32)
    layer.kernels.begin(layer.x, layer.ids, live)
    for portion in portions:
        slots = torch.full((EXPERTS,), -1, dtype=torch.int32)
        slots[portion] = layer.slots[portion]
        layer.kernels.add(layer.x, layer.ids, live, slots=slots, pool=layer.pool)
    out = layer.kernels.finish(layer.x, layer.weights, layer.ids, live)
    assert same_bits(out, layer.run(6))


def test_a_part_has_its_limit() -> None:
    layer = Layer()
    small = CpuLayerKernels(CODEC, SIZES, EXPERTS, TOP_K, clamp=CLAMP, part_tokens=TOKENS - 1)
    live = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(CodecError, match="at most 6"):
        small.begin(layer.x, layer.ids, live)
    layer.kernels = small
    assert same_bits(layer.run(1), layer.expected(1)), "a whole layer has none"


def admitted(layer: Layer, slots: int, absent: Sequence[int] = ()) -> Admission:
    """An admission of two layers over the layer's rows as the second one's; the first one's are garbage."""
    rows = torch.full((2 * EXPERTS, layer.pool.shape[1]), 0xFF, dtype=torch.uint8)
    rows[EXPERTS:] = layer.pool[SLOT_OF]
    return over_rows(rows, 2, slots, absent=[EXPERTS + e for e in absent])


@pytest.mark.parametrize("slots", [EXPERTS, 2 * EXPERTS + 40])
def test_an_admitted_layer_is_that_of_a_full_pool(slots: int) -> None:
    layer = Layer()
    expected = layer.expected(5)
    layer.ids[5:] = EXPERTS
    a = admitted(layer, slots)
    for call, copies in enumerate((len(set(layer.ids[:5].flatten().tolist())), 0), 1):
        out = layer.run(5, slots=a.table[1], pool=a.pool, admission=a, layer=1)
        assert same_bits(out, expected)
        assert layer.tally.tolist() == [10, 20, 30 + 5 * TOP_K], "the second call found all rows"
        assert int(layer.counts[:, 0].sum()) == call * 5 * TOP_K
        assert a.state[COPIES] == copies


def test_what_cannot_be_admitted_is_missing() -> None:
    layer = Layer()
    a = admitted(layer, 2 * EXPERTS, absent=[3])
    missing = int((layer.ids == 3).sum())
    assert missing > 0
    out = layer.run(slots=a.table[1], pool=a.pool, admission=a, layer=1)
    assert same_bits(out, layer.expected(left_out=frozenset({3})))
    assert layer.tally.tolist() == [10 + missing, 20, 30 + TOKENS * TOP_K]


def test_an_admission_comes_with_its_own_slots_and_pool_and_in_one_part() -> None:
    layer = Layer()
    a = admitted(layer, EXPERTS)
    for slots, pool in ((a.table[0], a.pool), (a.table[1], layer.pool)):
        with pytest.raises(CodecError, match="not those of the admission's layer 1"):
            layer.run(slots=slots, pool=pool, admission=a, layer=1)
    layer.kernels = CpuLayerKernels(CODEC, SIZES, EXPERTS, TOP_K, part_tokens=TOKENS - 1)
    with pytest.raises(CodecError, match="7 rows in an admitted layer: a part has at most 6"):
        layer.run(slots=a.table[1], pool=a.pool, admission=a, layer=1)
    assert (a.table == -1).all()


def test_a_layer_has_to_begin() -> None:
    layer = Layer()
    live = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(CodecError, match="had not begun"):
        layer.kernels.finish(layer.x, layer.weights, layer.ids, live)
