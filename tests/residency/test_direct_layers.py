"""Layers that are read in place from the arena: the same bits, no slots, places for good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.admissions import admission_of
from support.fake_moe import (
    EXPERTS,
    LAYERS,
    TOP_K,
    FakeModel,
    FakePacks,
    Passes,
    bits_equal,
    open_tiers,
    tiers,
)
from support.wrapped_packs import WrappedPack
from ziggurat.kernels.admission import CLOCK
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.inline.layers import InlineLayers
from ziggurat.residency.passes import PassMode, StepTokens
from ziggurat.residency.runtime_errors import HostCacheError, UnsupportedDeviceError
from ziggurat.residency.service import ExpertService

MODES: dict[str, dict[str, Any]] = {
    "inline": {"mode": "inline"},
    "replay": {"mode": "replay", "max_replays": 3},
    "exact": {"mode": "replay", "max_replays": 0},
}


def keys_of(*layers: int) -> set[int]:
    return {layer * EXPERTS + expert for layer in layers for expert in range(EXPERTS)}


def direct_keys(service: ExpertService) -> dict[int, int]:
    """The direct rows that the arena holds, and where."""
    return {key: service.cache._place_of[key] for key in service._direct_keys}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(sorted(MODES)),
    direct=st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS),
    slots=st.integers(1, 14) | st.just(48),
    more=st.integers(0, 6),
    eviction=st.sampled_from(["lru", "lfu-decay"]),
    batches=st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=4),
)
def test_any_set_of_layers_has_the_bits_of_the_resident_model(
    packs: FakePacks,
    model: FakeModel,
    mode: str,
    direct: set[int],
    slots: int,
    more: int,
    eviction: str,
    batches: list[tuple[int, bool]],
) -> None:
    places = 2 + len(direct) * EXPERTS + more  # two for reads in flight
    options: dict[str, Any] = {"slots": slots, "places": places, "eviction": eviction, "miss": MODES[mode]}
    with tiers(packs, on_device=True, direct=sorted(direct), **options) as service:
        before = direct_keys(service)
        assert set(before) == keys_of(*direct)
        run = Passes(model, service)
        for step, (tokens, prompt) in enumerate(batches):
            x = model.inputs(tokens, seed=step)
            flags = StepTokens(tokens, np.ones(tokens, dtype=np.bool_), eager=True) if prompt else None
            result = run.step(x, flags, padding=step % 2)
            assert bits_equal(result.value, packs.reference(model, x) if tokens else x)
        assert direct_keys(service) == before
        assert not keys_of(*direct) & set(service.slots.held())
        service.slots.check()
        service.cache.check()


def test_a_model_of_direct_layers_only_never_misses(packs: FakePacks, model: FakeModel) -> None:
    pack = WrappedPack(packs.open())
    with tiers(
        packs, slots=1, places=50, on_device=True, direct=range(LAYERS), miss=MODES["replay"], pack=pack
    ) as service:
        assert sorted(pack.log) == list(range(48))
        run = Passes(model, service)
        for step in range(3):
            x = model.inputs(4, seed=step)
            result = run.step(x)
            assert (result.outcome, result.passes, result.misses_first_pass) == ("clean", 1, 0)
            assert bits_equal(result.value, packs.reference(model, x))
        assert len(pack.log) == 48
        value = service.metrics.value
        assert value("ziggurat_hit_pairs_total") == 3 * 4 * LAYERS * TOP_K
        assert value("ziggurat_direct_rows") == 48
        assert value("ziggurat_tier_used_rows", "pool") == 0
        assert service.heat.known() > 0, "the routing of these layers is known all the same"


def test_a_long_prompt_streams_direct_layers_and_misses_nothing_there(
    packs: FakePacks, model: FakeModel
) -> None:
    with tiers(packs, slots=1, places=50, on_device=True, direct=[0, 1, 2], miss=MODES["replay"]) as service:
        run = Passes(model, service)
        run.step(model.inputs(1))
        assert not service.slots.free
        x = model.inputs(40)
        result = run.step(x, StepTokens(40, np.ones(40, dtype=np.bool_), eager=True))
        assert bits_equal(result.value, packs.reference(model, x))
        assert 0 < result.misses_first_pass < 40 * TOP_K, "of the last layer only"
        streamed = sum(
            service.metrics.value("ziggurat_fetched_rows_total", source, "staging")
            for source in ("arena", "pack")
        )
        assert streamed == 48 - 1


@pytest.mark.parametrize("mode", ["replay", "inline"])
def test_a_long_prompt_streams_also_where_no_layer_has_slots(
    packs: FakePacks, model: FakeModel, mode: str
) -> None:
    with tiers(packs, slots=1, places=50, on_device=True, direct=range(LAYERS), miss=MODES[mode]) as service:
        run = Passes(model, service)
        for tokens, streamed in ((4, 0), (40, 48)):
            x = model.inputs(tokens)
            result = run.step(x, StepTokens(tokens, np.ones(tokens, dtype=np.bool_), eager=True))
            assert bits_equal(result.value, packs.reference(model, x))
            assert result.misses_first_pass == 0
            assert service.metrics.value("ziggurat_fetched_rows_total", "arena", "staging") == streamed


def test_only_what_has_no_place_in_a_direct_layer_is_fetched(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=24, places=40, on_device=True, direct=[0, 3], miss=MODES["replay"]) as service:
        run = Passes(model, service)
        for step in range(4):
            run.step(model.inputs(2, seed=step))
        assert set(service.slots.held()) <= keys_of(1, 2)
        assert service.mode is PassMode.REPLAY


def test_a_warm_start_leaves_direct_layers_out_of_the_pool(
    packs: FakePacks, model: FakeModel, tmp_path: Any
) -> None:
    options: dict[str, Any] = {"places": 40, "on_device": True, "direct": [1], "heat_folder": tmp_path}
    with tiers(packs, slots=12, miss=MODES["replay"], **options) as service:
        for step in range(4):
            Passes(model, service).step(model.inputs(2, seed=step))
        service.save_heat()
    with tiers(packs, slots=12, miss=MODES["replay"], **options) as service:
        start = service.warm_start()
        service.preheated()
        assert start.heat.done
        assert start.pool_rows == 12
        assert not keys_of(1) & set(service.slots.held())
        service.cache.check()
    with tiers(packs, slots=36, miss=MODES["replay"], **options) as service:
        assert service.warm_start().pool_rows == 36, "a slot for every row that can have one"
        x = model.inputs(8, seed=9)
        result = Passes(model, service).step(x)
        assert (result.outcome, result.misses_first_pass) == ("clean", 0)
        assert bits_equal(result.value, packs.reference(model, x))


# -- layers that fetch their own rows ------------------------------------------------------------------------------


def test_layers_without_slots_stand_beside_layers_that_admit(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=9, places=50, on_device=True, direct=[0, 2]) as service:
        assert service.choice.serving == "inline"
        assert isinstance(service._layers, InlineLayers)
        run = Passes(model, service)
        for step in range(5):
            x = model.inputs(2, seed=step)
            assert bits_equal(run.step(x).value, packs.reference(model, x))
            service.collect()
        assert service.slots.used > 0
        assert set(service.slots.held()) <= keys_of(1, 3)
        passes = service.metrics.value("ziggurat_passes_total")
        clock = int(admission_of(service).state[CLOCK])
        assert clock == passes, "the first layer has no slots, and the clock goes on all the same"
        with pytest.raises(ZeroDivisionError):
            service.run_step(lambda path: 1 // 0, StepTokens(1))
        service.moe(0, model.inputs(2), torch.ones(2, TOP_K), torch.ones(2, TOP_K, dtype=torch.int64))
        assert int(admission_of(service).state[CLOCK]) == clock, "no token was live"


def test_churn_leaves_direct_layers_where_they_are(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=9, places=40, on_device=True, direct=[1, 3]) as service:
        before = direct_keys(service)
        run = Passes(model, service)
        with service.churn(seed=3, most=8):
            for step in range(40):
                x = model.inputs(2, seed=step)
                assert bits_equal(run.step(x).value, packs.reference(model, x))
        assert direct_keys(service) == before
        with service.paused():  # rows may still be on their way
            service.cache.check()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_read_ends_the_start_with_its_name(packs: FakePacks) -> None:
    pack = WrappedPack(packs.open())
    pack.failing[EXPERTS + 5] = "io"
    with pytest.raises(
        HostCacheError, match=r"1 rows of tiers.device.direct_layers .* expert 5 of layer 1 first"
    ):
        open_tiers(packs, slots=4, places=30, on_device=True, direct=[1, 2], pack=pack)


def test_an_arena_that_is_too_small_is_refused(packs: FakePacks) -> None:
    with pytest.raises(
        HostCacheError, match=r"24 rows want a place for good, and the host arena has 23 beside"
    ):
        open_tiers(packs, slots=4, places=25, on_device=True, direct=[1, 2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_device": False}, "read host memory anyway"),
        ({"on_device": True, "mapped": None}, "nobody offered the arena to the device"),
    ],
)
def test_kernels_that_cannot_read_the_arena_are_refused_by_name(
    packs: FakePacks, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"tiers.device.direct_layers: .*{said}"):
        open_tiers(packs, slots=4, places=40, direct=[1], **options)


def test_a_layer_that_does_not_exist_is_a_configuration_error(packs: FakePacks) -> None:
    with pytest.raises(ConfigError, match=r"layer 4 has no routed experts; the layers that do are 0\.\.3"):
        open_tiers(packs, slots=4, on_device=True, direct=[1, 4])


def test_the_test_of_bits_can_fail(packs: FakePacks, model: FakeModel) -> None:
    """Rows of direct layers are not copied: whoever overwrites their places changes results."""
    with tiers(packs, slots=4, places=40, on_device=True, direct=[0], miss=MODES["replay"]) as service:
        x = model.inputs(4)
        run = Passes(model, service)
        assert bits_equal(run.step(x).value, packs.reference(model, x))
        for place in direct_keys(service).values():
            service._arena.tensor[place].zero_()
        assert not torch.equal(run.step(x).value, packs.reference(model, x))
