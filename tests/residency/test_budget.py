"""The budget: sizes, floors and limits, each short number with its key, and that shrinking fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.budgets import FACTS, ROOMY, ROW, STRIDE, check_of, config, machine
from ziggurat.residency.budget import MachineLimits, ModelFacts, memory_reserve, plan
from ziggurat.residency.budget_plan import Plan
from ziggurat.residency.errors import BudgetError, ConfigError


def test_rows_have_a_stride_of_whole_pages_and_tiers_count_in_it() -> None:
    result = plan(config(device="25%", host="10%", readers=4), FACTS, ROW, machine=ROOMY)
    (rank,) = result.ranks
    assert (result.stride, result.rows, result.pack_bytes) == (STRIDE, 192, 192 * STRIDE)
    assert (rank.pool_rows, rank.pool_bytes) == (48, 48 * STRIDE)
    assert (rank.arena_rows, rank.arena_bytes) == (19, 19 * STRIDE)
    assert rank.coverage == 0.25
    assert result.ok
    assert result.require() is result


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        ("7 rows", 7),
        (STRIDE * 3 + STRIDE - 1, 3),
        ("64KiB", 8),
        ("100%", 192),
        ("2 GiB", 192),
        ("400 rows", 192),
    ],
)
def test_every_way_to_write_a_size_gives_whole_rows_capped_at_the_model(size: Any, rows: int) -> None:
    result = plan(config(device=size), FACTS, ROW, machine=ROOMY)
    assert result.ranks[0].pool_rows == rows
    assert any("hold every expert" in note for note in result.notes) == (size in ("2 GiB", "400 rows"))


def test_a_pool_without_a_row_is_refused_with_the_number_and_the_key() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(config(device=STRIDE - 1), FACTS, ROW, machine=ROOMY).require()
    message = str(caught.value)
    assert message == (
        "pool floor: needs 1 row (8.00 KiB a row), has 0 rows, short by 1 row;"
        " raise tiers.device.size to 8.00 KiB or more"
    )
    assert caught.value.plan.short[0].key == "tiers.device.size"


def test_a_graph_needs_every_expert_its_batch_can_route_to_in_one_layer() -> None:
    assert plan(config(device="7 rows"), FACTS, ROW, machine=ROOMY, graph_tokens=2).short[0].short_by == 1
    assert plan(config(device="8 rows"), FACTS, ROW, machine=ROOMY, graph_tokens=2).ok
    assert plan(config(device="32 rows"), FACTS, ROW, machine=ROOMY, graph_tokens=1000).pool_floor == 32


def test_an_arena_below_its_reads_in_flight_is_refused_but_none_at_all_is_not() -> None:
    small = plan(config(host="7 rows", readers=8), FACTS, ROW, machine=ROOMY)
    assert [(one.name, one.short_by, one.key) for one in small.short] == [
        ("arena floor", 1, "tiers.host.size")
    ]
    none = plan(config(host=0, readers=8), FACTS, ROW, machine=ROOMY)
    assert none.ok
    assert (none.arena_kind, none.ranks[0].arena_rows) == ("none", 0)
    assert none.ranks[0].staging_bytes == 8 * STRIDE
    assert not [one for one in none.checks if one.name == "arena floor"]


def test_more_readers_than_rows_do_not_raise_the_floor_above_the_model() -> None:
    facts = ModelFacts(layers=1, experts=4, top_k=1, hidden=256, intermediate=128)
    result = plan(config(host="100%", readers=64), facts, ROW, machine=ROOMY)
    assert result.ok
    assert result.arena_floor == 4


@pytest.mark.parametrize(
    ("limit", "name"), [("memory_available", "host memory"), ("cgroup_headroom", "cgroup memory")]
)
def test_pool_and_arena_of_all_ranks_count_against_host_memory_on_the_cpu(limit: str, name: str) -> None:
    available = 1 << 30
    room = available - memory_reserve(available)
    row = 4 << 20
    rows = room // row
    fits = config(device=f"{rows - 10} rows", host="10 rows")
    over = config(device=f"{rows - 10} rows", host="11 rows")
    facts = ModelFacts(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048)
    assert plan(fits, facts, row, machine=machine(**{limit: available})).ok
    short = plan(over, facts, row, machine=machine(**{limit: available})).short
    assert [(one.name, one.short_by) for one in short] == [(name, (rows + 1) * row - room)]
    assert short[0].key == "tiers.device.size"  # the larger of the two
    both = plan(fits, facts, row, machine=machine(**{limit: available}), tp_size=2)
    assert [one.name for one in both.short] == [name]
    assert plan(fits, facts, row, machine=machine(**{limit: available}), tp_size=2, rank=1).ok


def test_an_arena_above_the_memory_limit_is_refused_in_one_line() -> None:
    facts = ModelFacts(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048)
    result = plan(
        config(device="1 row", host="10 GiB"), facts, 4 << 20, machine=machine(cgroup_headroom=8 << 30)
    )
    assert result.refusal() == (
        "cgroup memory: needs 10.00 GiB (arena 10.00 GiB + pool 4.00 MiB; 819.20 MiB of 8.00 GiB left to"
        " everything else), has 7.20 GiB, short by 2.80 GiB;"
        " lower tiers.host.size or set tiers.host.on_limit: shrink"
    )


def test_shrink_fits_the_arena_and_says_so() -> None:
    facts = ModelFacts(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048)
    tight = config(device="1 row", host="10 GiB", host_extra={"on_limit": "shrink"})
    result = plan(tight, facts, 4 << 20, machine=machine(cgroup_headroom=8 << 30))
    assert result.ok
    spendable = (8 << 30) - memory_reserve(8 << 30)
    assert result.ranks[0].arena_rows == spendable // (4 << 20) - 1
    assert "arena shrunk from 2560 to 1842 rows" in result.notes[0]


def test_shrink_stops_at_the_floor_and_then_memory_is_what_is_short() -> None:
    facts = ModelFacts(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048)
    tight = config(device="1 row", host="10 GiB", host_extra={"on_limit": "shrink"})
    result = plan(tight, facts, 64 << 20, machine=machine(memory_available=512 << 20, packs_built=1))
    assert result.ranks[0].arena_rows == result.arena_floor == 8
    assert [one.name for one in result.short] == ["host memory"]


def test_locked_memory_binds_a_pinned_arena_and_on_limit_says_what_then() -> None:
    gpu = machine(device="cuda:0", memlock=10 * STRIDE, device_free=1 << 30)
    refuse = plan(config(host="20 rows"), FACTS, ROW, machine=gpu)
    assert [(one.name, one.short_by) for one in refuse.short] == [("locked memory", 10 * STRIDE)]
    shrink = plan(config(host="20 rows", host_extra={"on_limit": "shrink"}), FACTS, ROW, machine=gpu)
    assert (shrink.ok, shrink.arena_kind, shrink.ranks[0].arena_rows) == (True, "pinned", 10)
    pageable = plan(config(host="20 rows", host_extra={"on_limit": "pageable"}), FACTS, ROW, machine=gpu)
    assert (pageable.ok, pageable.arena_kind, pageable.ranks[0].arena_rows) == (True, "pageable", 20)
    assert "the arena is pageable" in pageable.notes[0]
    on_cpu = plan(config(host="20 rows"), FACTS, ROW, machine=machine(memlock=0))
    assert (on_cpu.ok, on_cpu.arena_kind) == (True, "pageable")


def test_pinned_arenas_fit_their_nodes_and_on_limit_says_what_if_not() -> None:
    available = 2 << 30
    room = available - memory_reserve(available)
    row = 4 << 20
    facts = ModelFacts(layers=60, experts=384, top_k=8, hidden=7168, intermediate=2048)
    gpu = machine(
        device="cuda:0", nodes=(1, 1), node_available=((0, 64 << 30), (1, available)), device_free=1 << 40
    )
    rows = room // 2 // row

    def planned(count: int, **host: Any) -> Plan:
        wanted = config(device="10 rows", host=f"{count} rows", host_extra=host)
        return plan(wanted, facts, row, machine=gpu, tp_size=2)

    fits = planned(rows)
    assert fits.ok
    assert [(one.numa_node, one.pinned_bytes) for one in fits.ranks] == [(1, rows * row)] * 2
    over = planned(rows + 1)
    assert [(one.name, one.key) for one in over.short] == [("memory of NUMA node 1", "tiers.host.size")]
    assert over.short[0].short_by == 2 * (rows + 1) * row - room
    shrunk = planned(rows + 1, on_limit="shrink")
    assert (shrunk.ok, [one.arena_rows for one in shrunk.ranks]) == (True, [rows, rows])
    pageable = planned(rows + 1, on_limit="pageable")
    assert (pageable.ok, pageable.arena_kind) == (True, "pageable")
    assert [(one.numa_node, one.pinned_bytes) for one in pageable.ranks] == [(None, 0)] * 2
    assert "what NUMA node 1 can give" in pageable.notes[0]


def test_ranks_on_two_nodes_count_against_one_each() -> None:
    gpu = machine(
        device="cuda:0", nodes=(0, 1), node_available=((0, 4 << 30), (1, 4 << 30)), device_free=1 << 40
    )
    result = plan(config(host="20 rows"), FACTS, ROW, machine=gpu, tp_size=2)
    assert [one.numa_node for one in result.ranks] == [0, 1]
    for node in (0, 1):
        assert check_of(result, f"memory of NUMA node {node}").needed == 20 * STRIDE
    alone = plan(config(host="20 rows"), FACTS, ROW, machine=gpu, tp_size=2, rank=1)
    assert [one.numa_node for one in alone.ranks] == [1]


def test_what_kernels_take_counts_against_the_device_and_not_for_the_pool() -> None:
    room = 47 * STRIDE
    gpu = machine(device="cuda:0", device_free=room + (1 << 20), device_workspace=1 << 20)
    result = plan(config(device="46 rows"), FACTS, ROW, machine=gpu)
    check = check_of(result, "device memory")
    assert (check.short_by, check.detail) == (
        STRIDE,
        "pool + 16.00 KiB of staging + 1.00 MiB for the kernels",
    )
    auto = plan(config(device="auto"), FACTS, ROW, machine=gpu)
    assert auto.ranks[0].pool_rows == (room - 2 * STRIDE) // 2 // STRIDE
    assert plan(config(device="45 rows"), FACTS, ROW, machine=gpu).ok


def test_on_limit_for_every_way_to_write_a_size_on_a_gpu() -> None:
    gpu = machine(device="cuda:0", memlock=20 * STRIDE, device_free=1 << 30)
    for size in ("10%", "19 rows", 20 * STRIDE, "auto"):
        for on_limit in ("refuse", "shrink", "pageable"):
            result = plan(config(host=size, host_extra={"on_limit": on_limit}), FACTS, ROW, machine=gpu)
            assert (result.ok, result.arena_kind) == (True, "pinned"), (size, on_limit)
            assert result.ranks[0].pinned_bytes == result.ranks[0].arena_bytes <= 20 * STRIDE


def test_notes_of_the_machine_and_memory_that_may_grow() -> None:
    noted = plan(config(), FACTS, ROW, machine=machine(notes=("device memory is not checked: no NVML",)))
    assert noted.notes[0] == "device memory is not checked: no NVML"
    small = machine(memory_available=300 << 20, memory_may_grow=True, packs_built=1)
    big = plan(config(host="100%"), FACTS, 4 << 20, machine=small)
    assert "may give it more once its memory is used" in (big.refusal() or "")
    assert "may give it more" not in (
        plan(config(host="100%"), FACTS, 4 << 20, machine=machine(memory_available=300 << 20)).refusal() or ""
    )


def test_a_node_that_the_arena_cannot_be_bound_to_is_noted() -> None:
    notes = plan(config(host="20 rows", host_extra={"numa": 1}), FACTS, ROW, machine=ROOMY).notes
    assert notes == ("tiers.host.numa: 1 has no effect on a pageable arena",)


def test_a_gpu_pool_counts_against_its_memory_and_not_against_the_hosts() -> None:
    gpu = machine(device="cuda:0", device_free=47 * STRIDE, memory_available=512 << 20)
    result = plan(config(device="46 rows", host="8 rows"), FACTS, ROW, machine=gpu)
    assert [(one.name, one.short_by, one.key) for one in result.short] == [
        ("device memory", STRIDE, "tiers.device.size")
    ]
    assert check_of(result, "host memory").needed == 8 * STRIDE


def test_packs_not_yet_built_need_space_and_a_writable_folder() -> None:
    whole = plan(config(), FACTS, ROW, machine=machine(disk_free=192 * STRIDE))
    assert [(one.name, one.key) for one in whole.short] == [("disk space", "tiers.disk.path")]
    assert plan(config(), FACTS, ROW, machine=machine(disk_free=0, packs_built=1)).ok
    half = plan(
        config(), FACTS, ROW, machine=machine(disk_free=96 * STRIDE, packs_building=97 * STRIDE + (80 << 10))
    )
    assert half.ok
    two = plan(config(), FACTS, ROW, machine=machine(disk_free=0, packs_built=1), tp_size=2)
    assert 192 * STRIDE < two.short[0].short_by < 193 * STRIDE + (80 << 10)
    read_only = machine(disk_writable=False)
    assert "packs is not writable and" in (plan(config(), FACTS, ROW, machine=read_only).refusal() or "")
    assert plan(config(), FACTS, ROW, machine=machine(disk_writable=False, packs_built=1)).ok


def test_direct_always_needs_a_filesystem_that_has_it() -> None:
    refused = plan(config(direct="always"), FACTS, ROW, machine=machine(direct_io=False)).refusal()
    assert refused is not None
    assert "tiers.disk.direct" in refused
    assert plan(config(direct="auto"), FACTS, ROW, machine=machine(direct_io=False)).ok
    assert plan(config(direct="always"), FACTS, ROW, machine=machine(direct_io=None)).ok


def test_several_short_numbers_still_make_one_line() -> None:
    refusal = plan(config(device=0, host="1 row"), FACTS, ROW, machine=machine(disk_free=0)).refusal()
    assert refusal is not None
    assert "\n" not in refusal
    assert refusal.endswith("(also short: arena floor, disk space)")


def test_auto_keeps_everything_resident_in_a_quarter_of_memory_and_then_needs_no_arena() -> None:
    result = plan(config(device="auto", host="auto"), FACTS, ROW, machine=ROOMY)
    assert (result.ranks[0].pool_rows, result.ranks[0].arena_rows) == (192, 0)
    assert result.notes == ("no arena: the pool holds every expert",)


def test_auto_takes_a_quarter_of_the_experts_where_all_are_too_many() -> None:
    facts = ModelFacts(layers=10, experts=100, top_k=4, hidden=256, intermediate=128)
    stride = 4 << 20
    available = 8 << 30
    result = plan(
        config(device="auto", host="auto"), facts, stride, machine=machine(memory_available=available)
    )
    assert (result.ranks[0].pool_rows, result.ranks[0].arena_rows) == (250, (7168 - 1000) // 2 // 4)
    tight = plan(config(device="auto", host="auto"), facts, stride, machine=machine(memory_available=1 << 30))
    spendable = ((1 << 30) - memory_reserve(1 << 30)) // stride
    assert tight.ranks[0].pool_rows == spendable // 2
    assert tight.ranks[0].pool_rows + tight.ranks[0].arena_rows <= spendable
    assert tight.ok
    tiny = plan(
        config(device="auto", host="auto"), facts, stride, machine=machine(memory_available=300 << 20)
    )
    assert tiny.ranks[0].arena_rows == 0
    assert "no arena: host memory has room for" in tiny.notes[0]


def test_an_arena_of_its_own_size_takes_every_row_that_fits_and_says_what_is_left() -> None:
    facts = ModelFacts(layers=10, experts=100, top_k=4, hidden=256, intermediate=128)
    stride = 4 << 20

    def auto(**limits: Any) -> tuple[int, str, bool]:
        gpu = machine(device="cuda:0", device_free=64 << 30, **limits)
        result = plan(config(device="10 rows", host="auto"), facts, stride, machine=gpu)
        return result.ranks[0].arena_rows, result.notes[-1], result.ok

    rows, note, ok = auto(memory_available=64 << 30)
    assert (rows, ok) == (1000, True)
    assert "auto takes every row, 3.91 GiB; 8.00 GiB of 64.00 GiB are left to everything else" in note
    rows, note, ok = auto(memory_available=3 << 30)
    assert (rows, ok) == ((3 << 30) * 7 // 8 // stride, True)
    assert f"auto takes {rows} of 1000 rows" in note
    assert "host memory has no room for more; 384.00 MiB of 3.00 GiB are left" in note
    assert "waits for the disk and runs again" in note
    rows, note, ok = auto(memory_available=64 << 30, cgroup_headroom=2 << 30)
    assert (rows, ok, "cgroup memory has no room" in note) == (448, True, True)
    rows, note, ok = auto(memory_available=64 << 30, memlock=30 * stride)
    assert (rows, ok, "the locked-memory limit has no room" in note) == (30, True, True)
    rows, note, ok = auto(memory_available=64 << 30, nodes=(1,), node_available=((0, 60 << 30), (1, 1 << 30)))
    assert (rows, ok, "NUMA node 1 has no room" in note) == (192, True, True)
    assert auto()[0] == 1000, "nothing is known of the machine"


def test_ranks_on_one_machine_share_its_memory() -> None:
    facts = ModelFacts(layers=10, experts=100, top_k=4, hidden=256, intermediate=128)
    for tp in (1, 2, 4):
        result = plan(
            config(device="auto", host="auto"),
            facts,
            4 << 20,
            machine=machine(memory_available=4 << 30),
            tp_size=tp,
        )
        assert result.ok
        assert len({one.pool_rows for one in result.ranks}) == 1
        room = ((4 << 30) - memory_reserve(4 << 30)) // tp
        assert result.ranks[0].pool_rows == min(250, room // 2 // (4 << 20))


def test_unequal_pools_of_two_ranks_and_a_list_of_another_length() -> None:
    result = plan(config(device=["40 rows", "0 rows"]), FACTS, ROW, machine=ROOMY, tp_size=2)
    assert [one.pool_rows for one in result.ranks] == [40, 0]
    assert "rank 1" in (result.refusal() or "")
    with pytest.raises(ConfigError, match="lists 2 sizes for 1 tensor-parallel ranks"):
        plan(config(device=["40 rows", "1 row"]), FACTS, ROW, machine=ROOMY)


def test_a_tp_size_that_does_not_divide_the_experts_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="tensor parallel size 3 does not divide the experts' 128 channels"):
        plan(config(), FACTS, ROW, machine=ROOMY, tp_size=3)
    with pytest.raises(ConfigError, match="at least 1"):
        plan(config(), FACTS, ROW, machine=ROOMY, tp_size=0)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        plan(config(), FACTS, ROW, machine=ROOMY, tp_size=2, rank=2)


def test_the_plan_is_plain_json_also_when_it_refuses() -> None:
    values = json.loads(json.dumps(plan(config(device=0), FACTS, ROW, machine=ROOMY).to_json()))
    assert values["ok"] is False
    assert values["refusal"].startswith("pool floor")
    assert values["ranks"][0]["pool_rows"] == 0
    floor = values["checks"][0]
    assert (floor["needed"], floor["have"], floor["short_by"], floor["key"]) == (1, 0, 1, "tiers.device.size")


sizes = st.one_of(
    st.integers(0, 1 << 36),
    st.integers(0, 12_000).map(lambda n: f"{n} rows"),
    st.integers(0, 100).map(lambda n: f"{n}%"),
    st.just("auto"),
)


@settings(max_examples=100, deadline=None)
@given(
    device=sizes,
    host=sizes,
    on_limit=st.sampled_from(["refuse", "shrink", "pageable"]),
    readers=st.integers(1, 64),
    tp=st.sampled_from([1, 2, 4]),
    row=st.integers(1, 8 << 20),
    memory=st.none() | st.integers(0, 1 << 38),
    cgroup=st.none() | st.integers(0, 1 << 38),
    memlock=st.none() | st.integers(0, 1 << 36),
    device_free=st.none() | st.integers(0, 1 << 37),
    workspace=st.integers(0, 1 << 32),
    nodes=st.lists(st.none() | st.integers(0, 1), max_size=4),
    node_available=st.lists(st.integers(0, 1 << 38), max_size=2),
    disk_free=st.none() | st.integers(0, 1 << 40),
    kind=st.sampled_from(["cpu", "cuda:0"]),
    layers=st.integers(1, 61),
    experts=st.integers(1, 384),
)
def test_an_accepted_plan_keeps_every_limit_and_a_refused_one_is_short_by_exactly_what_it_says(
    device: Any, host: Any, on_limit: str, readers: int, tp: int, row: int, memory: int | None, cgroup: int
    | None, memlock: int | None, device_free: int | None, workspace: int, nodes: list[int | None],
    node_available: list[int], disk_free: int | None, kind: str, layers: int,
    experts: int,
) -> None:  # fmt: skip
    facts = ModelFacts(layers=layers, experts=experts, top_k=1, hidden=4096, intermediate=2048)
    limits = MachineLimits(
        device=kind, memory_available=memory, cgroup_headroom=cgroup, memlock=memlock,
        device_free=device_free, device_workspace=workspace if kind != "cpu" else 0, nodes=tuple(nodes),
        node_available=tuple(enumerate(node_available)), disk_free=disk_free,
    )  # fmt: skip
    wanted = config(device=device, host=host, host_extra={"on_limit": on_limit}, readers=readers)
    result = plan(wanted, facts, row, machine=limits, tp_size=tp)
    assert result.stride % 4096 == 0
    assert row <= result.stride < row + 4096
    for rank in result.ranks:
        assert 0 <= rank.pool_rows <= result.rows
        assert 0 <= rank.arena_rows <= result.rows
        assert rank.pool_bytes == rank.pool_rows * result.stride
        assert rank.coverage == rank.pool_rows / result.rows
    host_bytes = sum(one.host_bytes + (one.pool_bytes if kind == "cpu" else 0) for one in result.ranks)
    if result.ok:
        assert result.refusal() is None
        assert all(one.pool_rows >= 1 for one in result.ranks)
        assert all(one.arena_rows == 0 or one.arena_rows >= result.arena_floor for one in result.ranks)
        assert all(limit is None or host_bytes <= limit for limit in (memory, cgroup))
        if result.arena_kind == "pinned" and memlock is not None:
            assert all(one.arena_bytes <= memlock for one in result.ranks)
        for node, available in enumerate(node_available):
            assert sum(one.pinned_bytes for one in result.ranks if one.numa_node == node) <= available
        if kind != "cpu" and device_free is not None:
            assert all(one.pool_bytes + workspace <= device_free for one in result.ranks)
    else:
        assert "\n" not in (result.refusal() or "\n")
        for check in result.short:
            assert check.short_by == check.needed - check.have > 0
            assert check.key.startswith("tiers.")
            assert check.key in check.line()


def test_asking_for_more_arena_than_memory_is_refused_even_if_the_model_needs_less() -> None:
    small = ModelFacts(layers=6, experts=32, top_k=4, hidden=256, intermediate=128)
    tight = machine(memory_available=8 << 30)
    result = plan(config(host="100 GiB"), small, ROW, machine=tight)
    [check] = result.short
    assert check.key == "tiers.host.size"
    assert check.needed == 100 << 30
    assert check.short_by == (100 << 30) - check.have
    with pytest.raises(BudgetError, match=r"arena size: needs 100\.00 GiB .* short by .* tiers\.host\.size"):
        result.require()
    assert plan(config(host="100 GiB", host_extra={"on_limit": "shrink"}), small, ROW, machine=tight).ok
    assert plan(config(host="4 GiB"), small, ROW, machine=tight).ok
