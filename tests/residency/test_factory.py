"""From a configuration to a running service."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal
from support.wrapped_packs import WrappedPack
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.budget import MachineLimits
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import BudgetError
from ziggurat.residency.factory import geometry_of, heat_folder, open_service
from ziggurat.residency.runtime_errors import GeometryMismatchError, UnsupportedDeviceError
from ziggurat.residency.service import ExpertService


def config(packs: FakePacks, *, device: Any = "25%", host: Any = "50%", **sections: Any) -> TiersConfig:
    tier_set = {
        "disk": {"path": str(packs.paths[0].parent), "readers": 2},
        "host": {"size": host},
        "device": device if isinstance(device, dict) else {"size": device},
    }
    return TiersConfig.from_mapping({"tiers": tier_set, "heat": {"path": None}, **sections})


def opened(packs: FakePacks, tiers: TiersConfig, pack: WrappedPack, **options: Any) -> ExpertService:
    return open_service(tiers, packs.geometry, pack, get_codec(packs.codec), **options)


@pytest.mark.parametrize(
    ("device", "host", "slots", "places"),
    [("25%", "50%", 12, 24), ("5 rows", "auto", 5, 48), ("100%", "auto", 48, 2), ("1 rows", "0", 1, 2)],
)
def test_tiers_have_the_sizes_of_the_plan(
    packs: FakePacks, model: FakeModel, device: str, host: str, slots: int, places: int
) -> None:
    service = opened(packs, config(packs, device=device, host=host), WrappedPack(packs.open()))
    assert service.slots.slots == slots
    assert service.cache.capacity + service.cache.staging == places
    x = model.inputs(3)
    assert bits_equal(Passes(model, service).step(x).value, packs.reference(model, x))
    service.close()


def test_a_refused_plan_allocates_nothing_and_closes_the_pack(packs: FakePacks) -> None:
    pack = WrappedPack(packs.open())
    with pytest.raises(BudgetError, match=r"host memory: .*tiers\.host\.size"):
        opened(packs, config(packs), pack, machine=MachineLimits(memory_available=100 << 10))
    assert pack.closed


def test_a_foreign_pack_is_refused_and_closed(packs: FakePacks, packs_w2: FakePacks) -> None:
    pack = WrappedPack(packs_w2.open())
    with pytest.raises(GeometryMismatchError, match="codec w2"):
        opened(packs, config(packs), pack)
    assert pack.closed


def test_a_device_without_a_pool_is_refused(packs: FakePacks) -> None:
    pack = WrappedPack(packs.open())
    with pytest.raises(UnsupportedDeviceError, match="cuda:0"):
        opened(packs, config(packs, device={"size": "25%", "device": "cuda:0"}), pack)


def test_geometry_is_one_ranks(packs_tp2: FakePacks) -> None:
    geometry = geometry_of(packs_tp2.checkpoint, 2)
    assert (geometry.layers, geometry.experts, geometry.hidden, geometry.intermediate) == (4, 12, 64, 32)
    assert geometry.layer_ids == (0, 1, 2, 3)
    assert geometry.split(geometry.key(3, 5)) == (3, 5)


def test_heat_lies_beside_the_packs_unless_told_otherwise(packs: FakePacks) -> None:
    folder = packs.paths[0].parent
    assert heat_folder(config(packs, heat={"path": "auto"})) == folder
    assert heat_folder(config(packs, heat={"path": str(folder / "heat")})) == folder / "heat"
    assert heat_folder(config(packs)) is None
