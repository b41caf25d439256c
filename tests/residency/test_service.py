"""A service's life: geometry checks, warm start, heat, pausing, closing."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fake_moe import EXPERTS, FakeModel, FakePacks, Passes, bits_equal, config_for, open_tiers, tiers
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.pool import CpuPool
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.consensus import LocalConsensus, NoConsensus
from ziggurat.residency.heat import HALF_LIFE_STEPS, HeatKey, HeatMap, load_heat
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import PassMode
from ziggurat.residency.runtime_errors import GeometryMismatchError
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.usefixtures("layers")


def heat_file(packs: FakePacks, folder: Path) -> Path:
    header = packs.open().header
    key = HeatKey(
        header.identity,
        header.codec,
        header.codec_version,
        header.layers,
        header.experts,
        header.hidden,
        header.intermediate,
    )
    return folder / key.filename(0, 1)


def run_some(packs: FakePacks, model: FakeModel, folder: Path, steps: int = 4, **options: Any) -> list[int]:
    """Steps of a service that keeps heat in `folder`; its keys, hottest first."""
    with tiers(packs, slots=12, heat_folder=folder, **options) as service:
        run = Passes(model, service)
        for seed in range(steps):
            run.step(model.inputs(2, seed=seed))
        return [key for key, _ in service.heat.order()]


# -- warm start ----------------------------------------------------------------------------------------------------


def test_a_pool_with_room_for_all_is_filled_at_start(packs: FakePacks, model: FakeModel) -> None:
    with tiers(packs, slots=48) as service:
        start = service.warm_start()
        assert (start.pool_rows, start.arena_rows) == (48, 0)
        run = Passes(model, service)
        for seed in range(3):
            assert run.step(model.inputs(4, seed=seed)).misses_first_pass == 0
        assert service.cache.used == 0, "what can never be evicted needs no second copy"


def test_without_heat_a_smaller_pool_starts_cold(packs: FakePacks, tmp_path: Path) -> None:
    with tiers(packs, slots=12, heat_folder=tmp_path) as service:
        start = service.warm_start()
        assert (start.pool_rows, start.arena_rows, start.heat.done) == (0, 0, False)
        assert "no heat file" in start.heat.reason


def test_the_hottest_rows_fill_the_pool_and_the_next_ones_the_arena(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    hottest = run_some(packs, model, tmp_path)
    with tiers(packs, slots=6, places=10, heat_folder=tmp_path) as service:
        start = service.warm_start()
        service.preheated()
        assert (start.pool_rows, start.arena_rows, start.heat.done) == (6, 8, True)
        assert set(service.slots.held()) == set(hottest[:6])
        assert service.slots.policy.order() == hottest[:6]
        assert {key for key in range(48) if service.cache.holds(key)} == set(hottest[6:14])
        x = model.inputs(2)
        assert bits_equal(Passes(model, service).step(x).value, packs.reference(model, x))


def test_warm_start_can_be_switched_off_without_losing_heat(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    hottest = run_some(packs, model, tmp_path)
    with tiers(packs, slots=6, heat_folder=tmp_path, heat={"warm_start": False}) as service:
        start = service.warm_start()
        assert (start.pool_rows, start.arena_rows, start.heat.done) == (0, 0, True)
        assert [key for key, _ in service.heat.order()] == hottest


# -- heat ----------------------------------------------------------------------------------------------------------


def test_heat_is_saved_every_so_many_steps_and_at_the_end(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    path = heat_file(packs, tmp_path)
    service = open_tiers(packs, slots=12, heat_folder=tmp_path, heat={"save_every_steps": 3})
    run = Passes(model, service)
    there = []
    for seed in range(3):
        there.append(path.exists())
        run.step(model.inputs(1, seed=seed))
    assert there == [False] * 3
    assert path.exists()
    third = path.read_bytes()
    run.step(model.inputs(1, seed=9))
    assert path.read_bytes() == third
    service.close()
    assert path.read_bytes() != third


def test_a_service_that_did_nothing_leaves_the_heat_of_others_alone(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    run_some(packs, model, tmp_path)
    before = heat_file(packs, tmp_path).read_bytes()
    open_tiers(packs, slots=12, heat_folder=tmp_path).close()
    assert heat_file(packs, tmp_path).read_bytes() == before
    with tiers(packs, slots=12, heat_folder=tmp_path) as service:
        Passes(model, service).step(model.inputs(1, seed=5))
    assert heat_file(packs, tmp_path).read_bytes() == before


def test_a_damaged_heat_file_does_not_stop_a_start(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    heat_file(packs, tmp_path).write_bytes(b"\xff" * 100)
    with tiers(packs, slots=12, heat_folder=tmp_path) as service:
        start = service.warm_start()
        assert "damaged" in start.heat.reason
        assert start.pool_rows == 0
        Passes(model, service).step(model.inputs(1))


def test_heat_that_cannot_be_written_is_logged_once_and_harms_nothing(
    packs: FakePacks, model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    run_some(packs, model, tmp_path / "file", heat={"save_every_steps": 1})
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


@pytest.mark.parametrize("miss", [{"mode": "inline"}, {"mode": "replay", "max_replays": 1}], ids=str)
def test_heat_is_the_routing_of_the_all_resident_model(
    packs: FakePacks, model: FakeModel, miss: dict[str, Any]
) -> None:
    x = model.inputs(3)
    counts = torch.zeros(4, EXPERTS)

    def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        counts[layer] += torch.bincount(ids.flatten(), minlength=EXPERTS)
        return packs.resident()(layer, h, weights, ids)

    model.forward(x, moe)
    with tiers(packs, slots=30, miss=miss) as service:
        result = Passes(model, service).step(x, padding=4)
        assert (result.passes > 1) == (service.mode is PassMode.REPLAY)
        half_life = HALF_LIFE_STEPS
        assert torch.allclose(torch.from_numpy(service.heat.counts), counts.double() * 0.5 ** (1 / half_life))


# -- pausing and closing -------------------------------------------------------------------------------------------


def test_a_pause_holds_the_background_back(packs: FakePacks, model: FakeModel, tmp_path: Path) -> None:
    run_some(packs, model, tmp_path)
    pack = WrappedPack(packs.open())
    reading, gate = threading.Event(), threading.Event()
    service = open_tiers(packs, slots=2, places=12, pack=pack, heat_folder=tmp_path)

    def before(key: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            gate.wait()

    pack.before = before
    service.warm_start()
    reading.wait()
    events: list[str] = []

    def capture() -> None:
        with service.paused():
            events.append(f"captured with {service.cache.used} rows")

    thread = threading.Thread(target=capture)
    thread.start()
    assert events == []
    gate.set()
    thread.join()
    service.preheated()
    assert service.cache.used == 10
    service.close()


def test_without_background_work_a_pause_is_nothing(packs: FakePacks) -> None:
    with tiers(packs, slots=4) as service, service.paused(), service.paused():
        pass


def test_closing_joins_and_gives_everything_back(packs: FakePacks, model: FakeModel, tmp_path: Path) -> None:
    run_some(packs, model, tmp_path)
    pack = WrappedPack(packs.open())
    service = open_tiers(packs, slots=2, pack=pack, heat_folder=tmp_path)
    service.warm_start()
    service.close()
    service.close()
    assert pack.closed
    assert not [t for t in threading.enumerate() if t.name == "ziggurat-preheat"]


# -- geometry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("layers", 3),
        ("experts", 13),
        ("hidden", 65),
        ("intermediate", 32),
        ("layer_ids", (0, 1, 2, 4)),
    ],
)
def test_a_pack_of_another_model_is_refused_by_name(packs: FakePacks, change: str, value: Any) -> None:
    geometry = dataclasses.replace(packs.geometry, **{change: value})
    with pytest.raises(GeometryMismatchError, match=change.replace("_", ".")):
        build(packs, geometry=geometry)


def build(packs: FakePacks, **changes: Any) -> ExpertService:
    pack = packs.open()
    parts: dict[str, Any] = {
        "geometry": packs.geometry,
        "codec": get_codec("bf16"),
        "pool": CpuPool(4, pack.header.stride),
        "consensus": LocalConsensus(),
    }
    parts.update(changes)
    return ExpertService(
        config_for(packs.paths[0].parent),
        parts["geometry"],
        parts["codec"],
        pack,
        parts["pool"],
        None,
        consensus=parts["consensus"],
        metrics=TierMetrics(),
    )


def test_parts_that_do_not_fit_together_are_refused(packs: FakePacks) -> None:
    stride = packs.open().header.stride
    for changes, message in (
        ({"codec": get_codec("w2")}, "codec bf16"),
        ({"pool": CpuPool(4, stride * 2)}, "stride"),
        ({"consensus": NoConsensus(0, 2)}, "intermediate|tensor-parallel size"),
        ({"consensus": NoConsensus(1, 1)}, "tensor-parallel rank"),
        ({"geometry": dataclasses.replace(packs.geometry, top_k=0)}, "top_k"),
    ):
        with pytest.raises(GeometryMismatchError, match=message):
            build(packs, **changes)


def test_auto_is_inline_where_the_host_computes(packs: FakePacks, layers: str) -> None:
    auto = PassMode.INLINE if layers == "host" else PassMode.REPLAY
    for miss, mode in (
        ({}, auto),
        ({"mode": "inline"}, PassMode.INLINE),
        ({"mode": "replay"}, PassMode.REPLAY),
    ):
        with tiers(packs, slots=4, miss=miss) as service:
            assert service.mode is mode


def test_two_services_share_nothing(packs: FakePacks, packs_w2: FakePacks, model: FakeModel) -> None:
    x = model.inputs(2)
    with tiers(packs, slots=6) as one, tiers(packs_w2, slots=6) as other:
        first, second = Passes(model, one), Passes(model, other)
        for _ in range(2):
            assert bits_equal(first.step(x).value, packs.reference(model, x))
            assert bits_equal(second.step(x).value, packs_w2.reference(model, x))
        assert (one.slots.table.codec, other.slots.table.codec) == ("bf16", "w2")
        assert one.metrics.value("ziggurat_routed_pairs_total") == 2 * 4 * 2 * 3


def test_heat_of_a_service_can_be_read_by_its_key(packs: FakePacks, model: FakeModel, tmp_path: Path) -> None:
    hottest = run_some(packs, model, tmp_path)
    header = packs.open().header
    key = HeatKey(header.identity, "bf16", header.codec_version, 4, EXPERTS, 64, 64)
    heat = HeatMap(4, EXPERTS)
    assert load_heat(heat_file(packs, tmp_path), key, heat).done
    assert [key for key, _ in heat.order()] == hottest
    assert torch.from_numpy(heat.counts).isfinite().all()
