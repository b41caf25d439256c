"""The budget of a GPU beside its pool: staging memory for prompts, and layers that are read in place."""

from __future__ import annotations

from typing import Any

import pytest

from support.budgets import FACTS, ROOMY, ROW, STRIDE, check_of, config, machine
from ziggurat.kernels.lookahead import SPARES
from ziggurat.residency.budget import ModelFacts, plan
from ziggurat.residency.errors import ConfigError


@pytest.mark.parametrize(
    ("staging", "free", "parts", "rows"),
    [
        ("auto", 1 << 30, 4, 32),  # no part needs more rows than a layer has experts
        ("auto", 200 * STRIDE, 2, 6),  # a sixteenth of the device
        ("auto", 20 * STRIDE, 2, 1),
        ("2 rows", 1 << 30, 2, 1),
        ("15 rows", 1 << 30, 2, 7),
        ("16 rows", 1 << 30, 4, 4),
        (STRIDE * 41, 1 << 30, 4, 10),
        ("1000 rows", 1 << 30, 4, 32),
    ],
)
def test_staging_memory_is_counted_before_the_pool(staging: Any, free: int, parts: int, rows: int) -> None:
    gpu = machine(device="cuda:0", device_free=free)
    result = plan(config(device="auto", staging=staging), FACTS, ROW, machine=gpu)
    (rank,) = result.ranks
    if rank.pool_rows == 192:  # nothing is absent then
        result = plan(config(device="50%", staging=staging), FACTS, ROW, machine=gpu)
        (rank,) = result.ranks
    assert (rank.ring_parts, rank.ring_rows) == (parts, rows)
    assert rank.ring_bytes == parts * rows * STRIDE
    assert check_of(result, "device memory").needed == rank.pool_bytes + rank.ring_bytes
    assert result.ok
    assert (
        "tiers.device.staging has room for 1000 rows; 128 are used, since a part of it holds at most the 32 experts "
        "of a layer" in result.notes
    ) == (staging == "1000 rows")


def test_auto_bounds_staging_memory_whatever_rows_and_devices_are() -> None:
    facts = ModelFacts(layers=43, experts=256, top_k=6, hidden=4096, intermediate=2048)
    (rank,) = plan(
        config(), facts, 7077888, machine=machine(device="cuda:0", device_free=140 << 30, memlock=None)
    ).ranks
    assert (rank.ring_parts, rank.ring_rows) == (4, 14)
    assert rank.ring_bytes < 384 << 20


def test_staging_memory_of_less_than_two_rows_is_refused() -> None:
    gpu = machine(device="cuda:0", device_free=1 << 30)
    for size in (0, "1 row", STRIDE * 2 - 1):
        refusal = plan(config(staging=size), FACTS, ROW, machine=gpu).refusal() or ""
        assert refusal.startswith("staging floor: needs 2 rows (8.00 KiB a row; one arrives while another")
        assert refusal.endswith("raise tiers.device.staging to 16.00 KiB or more, or set it to auto")
    big = plan(
        config(device="1 row", staging="128 rows"),
        FACTS,
        ROW,
        machine=machine(device="cuda:0", device_free=9999),
    )
    assert big.short[0].key == "tiers.device.staging"


GPU = {"device": "cuda:0", "device_free": 1 << 30, "memlock": None}


def test_rows_of_direct_layers_take_places_of_the_arena_and_no_slots() -> None:
    gpu = machine(**GPU)
    result = plan(config(device="100%", host="100%", direct_layers=[1, 4]), FACTS, ROW, machine=gpu)
    (rank,) = result.ranks
    assert result.ok
    assert (rank.direct_rows, rank.pool_rows, rank.arena_rows) == (64, 128, 192)
    assert (
        "tiers.device.size has room for 192 rows; 128 hold every expert that is not read in place and are used"
        in result.notes
    )
    assert rank.ring_rows, "prompts stream these layers, too"
    auto = plan(config(device="auto", host="auto", direct_layers=[5]), FACTS, ROW, machine=gpu).ranks[0]
    assert (auto.pool_rows, auto.arena_rows) == (160, 192)
    everything = plan(config(device="1 row", host="100%", direct_layers=[*range(6)]), FACTS, ROW, machine=gpu)
    assert everything.ok
    assert everything.ranks[0].direct_rows == 192


def test_an_arena_without_places_for_direct_layers_is_refused_with_the_number() -> None:
    for size, short in (("70 rows", "70 rows, short by 2 rows"), (0, "0 rows, short by 72 rows")):
        refusal = (
            plan(config(host=size, direct_layers=[0, 1]), FACTS, ROW, machine=machine(**GPU)).refusal() or ""
        )
        assert refusal.startswith(
            "arena floor: needs 72 rows (64 rows of direct layers and a place for each read in flight), has "
            f"{short}; raise tiers.host.size to 72 rows, "
            "or take layers out of tiers.device.direct_layers"
        )
    assert plan(config(host="72 rows", direct_layers=[0, 1]), FACTS, ROW, machine=machine(**GPU)).ok


def test_direct_layers_need_a_pinned_arena_of_a_gpu() -> None:
    pageable = machine(**{**GPU, "memlock": 10 * STRIDE})
    extra = {"on_limit": "pageable"}
    refusal = plan(
        config(host="80 rows", host_extra=extra, direct_layers=[0]), FACTS, ROW, machine=pageable
    ).refusal()
    assert refusal == (
        "direct layers: 32 rows are read in place from a pinned arena, and the arena is pageable; set tiers.host.size "
        "and tiers.host.on_limit so that it is, or take tiers.device.direct_layers out"
    )
    on_cpu = plan(config(host="80 rows", direct_layers=[0]), FACTS, ROW, machine=ROOMY).refusal() or ""
    assert on_cpu.startswith("direct layers: layers that a CPU computes read host memory anyway; take")


def test_direct_layers_are_named_as_the_model_numbers_them() -> None:
    facts = ModelFacts(3, 32, 4, 256, 128, layer_ids=(3, 4, 7))
    assert plan(config(host="80 rows", direct_layers=[7]), facts, ROW, machine=machine(**GPU)).ok
    with pytest.raises(ConfigError, match=r"layer 5 has no routed experts; the layers that do are 3\.\.4, 7"):
        plan(config(host="80 rows", direct_layers=[3, 5]), facts, ROW, machine=machine(**GPU))


def test_where_nothing_streams_there_is_no_staging_memory() -> None:
    gpu = machine(device="cuda:0", device_free=1 << 30)
    for limits, device, why in (
        (ROOMY, "25%", "on a CPU"),
        (gpu, "100%", "beside a pool that holds every expert"),
    ):
        assert plan(config(device=device), FACTS, ROW, machine=limits).ranks[0].ring_bytes == 0
        result = plan(config(device=device, staging="1 row"), FACTS, ROW, machine=limits)
        assert result.ok
        assert result.ranks[0].ring_bytes == 0
        assert f"tiers.device.staging has no effect {why}" in result.notes


def test_rows_for_looking_ahead_are_counted_beside_the_pool() -> None:
    gpu = machine(device="cuda:0", device_free=1 << 30)
    plain = plan(config(), FACTS, ROW, machine=gpu)
    result = plan(config(miss={"lookahead": 3}), FACTS, ROW, machine=gpu)
    (rank,) = result.ranks
    assert result.ok
    assert (plain.ranks[0].spare_bytes, rank.spare_bytes) == (0, SPARES * STRIDE)
    memory = check_of(result, "device memory")
    assert memory.needed == rank.pool_bytes + rank.ring_bytes + rank.spare_bytes
    assert memory.needed == check_of(plain, "device memory").needed + rank.spare_bytes
    assert "64.00 KiB of look-ahead" in memory.detail
    assert check_of(result, "look-ahead").ok


def test_an_automatic_pool_leaves_room_for_looking_ahead() -> None:
    gpu = machine(device="cuda:0", device_free=70 * STRIDE)
    without, rank = (
        plan(config(device="auto", miss={"lookahead": n}), FACTS, ROW, machine=gpu).ranks[0] for n in (0, 1)
    )
    assert rank.pool_rows == without.pool_rows - SPARES // 2
    assert rank.pool_bytes + rank.ring_bytes + rank.spare_bytes <= 70 * STRIDE


def test_a_pool_of_every_expert_has_nothing_to_look_ahead_for() -> None:
    gpu = machine(device="cuda:0", device_free=1 << 30)
    result = plan(config(device="100%", miss={"lookahead": 3}), FACTS, ROW, machine=gpu)
    assert result.ok
    assert result.ranks[0].spare_bytes == 0
    assert "miss.lookahead has no effect beside a pool that holds every expert" in result.notes
    assert [one.name for one in result.checks if one.name == "look-ahead"] == []


@pytest.mark.parametrize(
    ("miss", "host", "device", "said"),
    [
        ({}, {}, "cpu", "a CPU computes with host memory and fetches nothing ahead"),
        (
            {"mode": "replay"},
            {},
            "cuda:0",
            "and miss.mode is replay; set miss.lookahead to 0, or miss.mode to auto",
        ),
        (
            {},
            {"on_limit": "pageable"},
            "cuda:0",
            "and the arena is pageable; set miss.lookahead to 0, or set tiers",
        ),
        ({}, {"host": 0}, "cuda:0", "and there is none; set miss.lookahead to 0"),
    ],
)
def test_looking_ahead_where_nothing_is_fetched_is_refused(
    miss: dict[str, Any], host: dict[str, Any], device: str, said: str
) -> None:
    extra = {name: value for name, value in host.items() if name != "host"}
    asked = config(host=host.get("host", "10%"), host_extra=extra, miss={"lookahead": 3, **miss})
    limits = machine(device=device, device_free=1 << 30, memlock=STRIDE if extra else None)
    refusal = plan(asked, FACTS, ROW, machine=limits).refusal() or ""
    assert refusal.startswith("look-ahead: ")
    assert said in refusal
