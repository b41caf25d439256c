"""Rows that flow past the pool: bits, order, books, faults."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.fake_moe import EXPERTS, HIDDEN, LAYERS, TOP_K, FakeModel, FakePacks, bits_equal
from support.lazy_device import Name
from support.streams import Stream
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pool import CpuPool
from ziggurat.residency.passes import PassMode, PassState, StepState, StepTokens
from ziggurat.residency.runtime_errors import RoutingError, SlotError, StepError
from ziggurat.residency.streaming.courses import Course, Place, places
from ziggurat.residency.streaming.ring import StagingRing

EARLY: tuple[Name, ...] = ("copies", "kernels")
ROWS = LAYERS * EXPERTS


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    early=st.sampled_from(EARLY),
    held=st.sets(st.integers(0, ROWS - 1), max_size=30) | st.just(set(range(ROWS))),
    parts=st.integers(1, 4),
    rows=st.integers(1, 5) | st.just(EXPERTS),
    places=st.integers(1, 12) | st.just(60),
    tokens=st.integers(0, 40),
    padding=st.integers(0, 3),
    part_tokens=st.integers(3, 50),
    blind=st.none() | st.booleans(),
    ahead=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_sizes_give_the_bits_of_the_resident_model(
    packs: FakePacks,
    model: FakeModel,
    early: Name,
    held: set[int],
    parts: int,
    rows: int,
    places: int,
    tokens: int,
    padding: int,
    part_tokens: int,
    blind: bool | None,
    ahead: bool,
    seed: int,
) -> None:
    stream = Stream.over(
        packs,
        early=early,
        slots=max(1, len(held)),
        parts=parts,
        rows=rows,
        places=places,
        part_tokens=part_tokens,
    )
    stream.hold(sorted(held))
    if ahead:
        read_ahead(stream)
    before = (stream.slots.table.numpy.copy(), stream.slots.policy.order())
    for step in range(2):
        x = model.inputs(tokens, seed=seed + step)
        value, _ = stream.step(model, x, blind=blind, padding=padding)
        assert bits_equal(value, packs.reference(model, x) if tokens else x)
    assert np.array_equal(stream.slots.table.numpy, before[0])
    assert stream.slots.policy.order() == before[1]
    stream.slots.check()
    stream.cache.check()


def read_ahead(stream: Stream) -> list[list[int]]:
    """Rows are read early as soon as anybody says what comes next, all that fit; the log of what was said."""
    said: list[list[int]] = []

    def upcoming(keys: Sequence[int]) -> None:
        said.append(list(keys))
        stream.fetcher.drain()
        if keys:
            stream.cache.read_early(keys, spare=1)
        else:
            stream.cache.forget_early()

    stream.fetcher.upcoming = upcoming
    return said


def test_a_blind_pass_says_what_comes_next_and_finds_it_read(packs: FakePacks, model: FakeModel) -> None:
    stream = Stream.over(packs, parts=2, rows=4, places=20, staging=16)
    said = read_ahead(stream)
    x = model.inputs(30)
    value, _ = stream.step(model, x, blind=True)
    assert bits_equal(value, packs.reference(model, x))
    assert said[0] == list(range(8, 24)), "four parts behind the two that are in the ring"
    assert said[-1] == []
    rows = [key for keys in said for key in keys]
    assert set(rows) == set(range(8, ROWS))
    assert stream.cache.ahead_used == ROWS - 8, "every row but those of the first two parts had been read"
    stream.cache.check()


def test_a_row_is_read_once_by_a_pass_and_the_thread_ahead_of_it(packs: FakePacks, model: FakeModel) -> None:
    """The thread gets to what it was told last whenever a row of the pass has been read."""
    pack = WrappedPack(packs.open())
    stream = Stream.over(packs, parts=2, rows=1, places=20, staging=16, pack=pack)
    said: list[Sequence[int]] = [()]
    stream.fetcher.upcoming = said.append

    def read_ahead(key: int) -> None:
        pack.before = lambda key: None
        stream.cache.read_early(said[-1][:1], spare=8)
        pack.before = read_ahead

    pack.before = read_ahead
    x = model.inputs(30)
    value, _ = stream.step(model, x, blind=True)
    assert bits_equal(value, packs.reference(model, x))
    assert sorted(pack.log) == list(range(ROWS))
    assert stream.cache.ahead_used > ROWS // 4


def test_a_pass_that_raises_leaves_no_row_waiting(packs: FakePacks, model: FakeModel) -> None:
    stream = Stream.over(packs, parts=2, rows=4, places=8, staging=8)
    read_ahead(stream)
    epoch = stream.cache.open_epoch()
    stream.layers.begin(stream.slots.table.numpy, StepTokens(30), epoch, blind=True)
    assert stream.cache.read_early(range(20, 48), spare=0).full
    stream.layers.end()
    stream.fetcher.drain()
    stream.cache.close_epoch(epoch)
    assert stream.cache.read_early(range(20, 48), spare=0).read == 8
    stream.cache.check()


# -- the test above can fail ---------------------------------------------------------------------------------------


def test_copies_that_do_not_wait_for_the_kernels_before_them_are_noticed(
    packs: FakePacks, model: FakeModel
) -> None:
    stream = Stream.over(packs, early="copies", follows=False)
    x = model.inputs(20)
    value, _ = stream.step(model, x)
    assert not bits_equal(value, packs.reference(model, x))


def test_kernels_that_do_not_wait_for_their_rows_are_noticed(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream.over(packs, early="kernels")
    monkeypatch.setattr("support.lazy_device.LazyPool.ready", lambda self: None)
    x = model.inputs(20)
    value, _ = stream.step(model, x)
    assert not bits_equal(value, packs.reference(model, x))


def test_a_part_that_is_refilled_before_its_kernels_are_queued_is_noticed(
    packs: FakePacks, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream.over(packs, early="copies")
    parts = StagingRing.parts.fget  # type: ignore[attr-defined]  # a property
    monkeypatch.setattr(StagingRing, "parts", property(lambda self: parts(self) + 1))
    x = model.inputs(20)
    value, _ = stream.step(model, x)
    assert not bits_equal(value, packs.reference(model, x))


# -- what is on its way when ---------------------------------------------------------------------------------------


class Recording(CpuPool):
    """A part of a ring that writes down what comes into it."""

    def __init__(self, slots: int, stride: int, log: list[str]) -> None:
        super().__init__(slots, stride)
        self._log = log

    def write(self, slots: object, rows: object) -> None:
        super().write(slots, rows)  # type: ignore[arg-type]
        self._log.append("copy")

    def ready(self) -> None:
        self._log.append("compute")


def recorded(stream: Stream, parts: int, rows: int) -> list[str]:
    log: list[str] = []
    stride = stream.slots.pool.stride
    stream.layers._ring = StagingRing([Recording(rows, stride, log) for _ in range(parts)])
    return log


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_blind_pass_is_ahead_by_a_ring_also_across_layers_and_looks_at_nothing(
    packs: FakePacks, model: FakeModel, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream.over(packs, places=60, rows=4)
    stream.cache.fill([(key, 1.0) for key in range(ROWS)], ROWS)
    log = recorded(stream, parts, 4)
    waits: list[torch.Tensor] = []
    real = torch.Tensor.cpu

    def waiting(tensor: torch.Tensor) -> torch.Tensor:
        waits.append(tensor)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", waiting)
    ahead: list[int] = []
    tokens = StepTokens(20, np.ones(20, dtype=np.bool_), eager=True)
    step = StepState(tokens, stream.cache.open_epoch())
    state = PassState(PassMode.INLINE, first=True, step=step)
    stream.state.arm(20, None)
    stream.layers.begin(stream.slots.table.numpy, tokens, step.epoch)

    def moe(layer: int, *call: torch.Tensor) -> torch.Tensor:
        ahead.append(log.count("copy") - log.count("compute"))
        return stream.layers.run(state, layer, *call)

    model.forward(model.inputs(20), moe)
    assert waits == []
    stream.layers.end()
    assert len(waits) == 1
    left = [min(parts, (LAYERS - layer) * EXPERTS // 4) for layer in range(LAYERS)]
    assert ahead == left, "before every layer a whole ring is on its way"
    assert log.count("copy") == log.count("compute") == LAYERS * EXPERTS // 4, "nothing comes twice"


def test_few_pairs_bring_only_what_they_are_routed_to(packs: FakePacks, model: FakeModel) -> None:
    pack = WrappedPack(packs.open())
    stream = Stream.over(packs, pack=pack, places=60)
    x = model.inputs(1)
    value, state = stream.step(model, x)
    assert bits_equal(value, packs.reference(model, x))
    assert len(pack.log) == LAYERS * TOP_K == sum(len(route.experts) for route in state.routes)


def test_tokens_in_parts_stream_a_layer_once_for_each(packs: FakePacks, model: FakeModel) -> None:
    stream = Stream.over(packs, places=60, part_tokens=10)
    x = model.inputs(30)
    value, _ = stream.step(model, x)
    assert bits_equal(value, packs.reference(model, x))
    assert sum(stream.fetcher.take_tally().staged.values()) == ROWS * 3


def test_layers_in_an_unexpected_order_are_served_all_the_same(packs: FakePacks, model: FakeModel) -> None:
    stream = Stream.over(packs, places=60)
    x, weights = model.inputs(20), torch.full((20, TOP_K), 1 / TOP_K)
    ids = torch.arange(20 * TOP_K).reshape(20, TOP_K) % EXPERTS
    tokens = StepTokens(20)
    state = PassState(PassMode.INLINE, first=True, step=StepState(tokens, stream.cache.open_epoch()))
    stream.state.arm(20, None)
    stream.layers.begin(stream.slots.table.numpy, tokens, state.step.epoch)
    for layer in (2, 2, 0, 3):
        value = stream.layers.run(state, layer, x, weights, ids)
        assert bits_equal(value, packs.resident()(layer, x, weights, ids))
    stream.layers.end()


# -- caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blind", [True, False])
def test_what_decoding_keeps_in_the_arena_stays_there(
    packs: FakePacks, model: FakeModel, blind: bool
) -> None:
    stream = Stream.over(packs, places=8)  # 2 staging, 6 cache
    kept = [5, 17, 29, 41, 3]
    epoch = stream.cache.open_epoch()
    for batch in stream.cache.rows(dict.fromkeys(kept, 1.0), epoch=epoch):
        stream.cache.settle(batch)
    stream.cache.close_epoch(epoch)
    stream.step(model, model.inputs(20), blind=blind)
    assert all(stream.cache.holds(key) for key in kept)
    assert stream.cache.used == 6, "the free place is taken"
    assert stream.cache.evictions == 0


# -- books ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [0, 13, 20])
def test_both_ways_keep_the_same_books(packs: FakePacks, model: FakeModel, prompt: int) -> None:
    seen = []
    for blind in (True, False):
        stream = Stream.over(packs, slots=9)
        stream.hold(range(0, 45, 5))
        prefill = np.arange(20) < prompt
        _, state = stream.step(model, model.inputs(20), prefill=prefill, blind=blind)
        assert state.step.routed_pairs == LAYERS * 20 * TOP_K
        assert 0 < state.step.missed_pairs < state.step.routed_pairs
        assert set(state.used) <= set(range(0, 45, 5))
        assert (sum(state.used.values()) > 0) == (prompt < 20), "a prompt counts as a scan"
        routes = [(r.layer, r.experts.tolist(), r.pairs.tolist()) for r in state.routes]
        seen.append((state.used, routes, state.step.missed_pairs))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("bad", [-1, EXPERTS, EXPERTS + 2**16, -(2**33)])
@pytest.mark.parametrize("blind", [True, False])
def test_an_expert_that_does_not_exist_is_an_error(packs: FakePacks, bad: int, blind: bool) -> None:
    stream = Stream.over(packs)
    tokens = StepTokens(2)
    state = PassState(PassMode.INLINE, first=True, step=StepState(tokens, stream.cache.open_epoch()))
    stream.state.arm(2, None)

    def run() -> None:
        stream.layers.begin(stream.slots.table.numpy, tokens, state.step.epoch, blind=blind)
        try:
            ids = torch.tensor([[0, 1, bad], [3, 4, 5]])
            stream.layers.run(state, 0, torch.ones(2, HIDDEN), torch.ones(2, TOP_K), ids)
        finally:
            stream.layers.end()

    with pytest.raises(RoutingError, match=r"experts are 0\.\.11"):
        run()


# -- faults --------------------------------------------------------------------------------------------------------

KEY = 12 * 3 + 4  # of the last layer: no later routing depends on it


@pytest.mark.parametrize("blind", [True, False])
@pytest.mark.parametrize("part_tokens", [7, 50])
def test_only_the_tokens_of_a_lost_row_fail(
    packs: FakePacks, model: FakeModel, blind: bool, part_tokens: int
) -> None:
    pack = WrappedPack(packs.open())
    pack.failing[KEY] = "io"
    stream = Stream.over(packs, pack=pack, part_tokens=part_tokens)
    x = model.inputs(20)
    value, state = stream.step(model, x, blind=blind)
    assert set(state.failures) == {KEY}
    assert state.failed_tokens is not None
    assert 0 < state.failed_tokens.sum() < 20
    wanted = packs.reference(model, x)
    kept = torch.from_numpy(~state.failed_tokens)
    assert bits_equal(value[kept], wanted[kept])
    assert not torch.equal(value[~kept], wanted[~kept])
    assert torch.isfinite(value).all()
    assert stream.fetcher.take_tally().io_errors == -(-20 // part_tokens)
    pack.failing.clear()
    value, state = stream.step(model, x, blind=blind)
    assert bits_equal(value, wanted)
    assert state.failures == {}


def test_a_lost_row_that_nobody_wants_fails_nobody(packs: FakePacks, model: FakeModel) -> None:
    pack = WrappedPack(packs.open())
    x = model.inputs(1)
    used = {KEY}

    def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        used.update((layer * EXPERTS + ids).flatten().tolist())
        return packs.resident()(layer, h, weights, ids)

    wanted = model.forward(x, moe)
    pack.failing = dict.fromkeys(set(range(ROWS)) - used, "checksum")
    value, state = Stream.over(packs, pack=pack).step(model, x, blind=True)
    assert (state.failures, state.failed_tokens) == ({}, None)
    assert bits_equal(value, wanted)


def test_a_pass_that_raises_leaves_nothing_behind(packs: FakePacks, model: FakeModel) -> None:
    stream = Stream.over(packs)
    x = model.inputs(20)
    calls: list[int] = []

    class Broken(FakeModel):
        def route(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(layer)
            if layer == 2:
                raise ZeroDivisionError
            return super().route(layer, h)

    with pytest.raises(ZeroDivisionError):
        stream.step(Broken(model.router, model.top_k), x)
    value, state = stream.step(model, x)
    assert bits_equal(value, packs.reference(model, x))
    assert state.step.routed_pairs == LAYERS * 20 * TOP_K


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_places_go_on_from_layer_to_layer() -> None:
    courses = {0: Course(np.arange(3), 2), 1: Course(np.arange(0), 2), 2: Course(np.array([1, 4]), 2)}
    assert list(places(courses, Place(0, 0, 1), 2)) == [(0, 0, 1), (0, 1, 0), (0, 1, 1), (2, 0, 0), (2, 1, 0)]
    assert courses[0].part(1).tolist() == [2]


def test_a_ring_has_parts_of_one_size() -> None:
    for sizes in ((), (2, 3)):
        with pytest.raises(SlotError, match="parts of one size"):
            StagingRing([CpuPool(size, 4096) for size in sizes])
    ring = StagingRing([CpuPool(2, 4096), CpuPool(2, 4096)])
    assert (ring.parts, ring.rows, ring.nbytes) == (2, 2, 4 * 4096)
    ring.close()


def test_a_blind_pass_takes_no_orders(packs: FakePacks) -> None:
    stream = Stream.over(packs)
    stream.layers.begin(stream.slots.table.numpy, StepTokens(20), stream.cache.open_epoch())
    with pytest.raises(StepError, match="cannot be told"):
        stream.layers.add(0, np.arange(2), None, lambda key, reason: None)  # type: ignore[arg-type]
