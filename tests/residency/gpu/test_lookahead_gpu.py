"""Services on a GPU whose layers look ahead: the bits of the all-resident pool, whatever happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.admissions import admission_of
from support.captured_moe import DIFFERENT, Captured, batch, opened
from support.fake_moe import FakeModel, FakePacks, bits_equal, make_packs
from ziggurat.kernels.lookahead import CHUNK_BYTES
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.gpu

CHURNED_STEPS = 10_000
WIDTH = 3


@pytest.fixture(scope="module", params=["w2", "bf16"])
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    return make_packs(tmp_path_factory.mktemp(request.param), codec=request.param)


@pytest.fixture(scope="module")
def model() -> FakeModel:
    made = FakeModel.make(dtype=torch.bfloat16)
    return dataclasses.replace(made, router=made.router.cuda())


@contextmanager
def looking_ahead(packs: FakePacks, model: FakeModel, pool: str, **options: Any) -> Iterator[ExpertService]:
    with opened(packs, pool, lookahead=WIDTH, **options) as service:
        service.lookahead.by(lambda layer: lambda x: model.route(layer, x.float())[1][:, :WIDTH])
        service.warm_start()
        service.preheated()
        yield service


@pytest.fixture(scope="module")
def resident(packs: FakePacks, model: FakeModel) -> list[torch.Tensor]:
    """What the all-resident pool answers, without any admission."""
    with opened(packs, "100%", mode="auto") as service:
        service.warm_start()
        captured = Captured(model, service)
        return [captured.step(batch(step)).value.clone() for step in range(DIFFERENT)]


@pytest.mark.parametrize("arena", ["100%", "50%", "7 rows"])
@pytest.mark.parametrize("pool", ["50%", "25%", "19%", "4 rows"])
def test_pools_and_arenas_of_any_size(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], pool: str, arena: str
) -> None:
    with looking_ahead(packs, model, pool, arena=arena, slot_seed=5) as service:
        captured = Captured(model, service)
        for step, expected in enumerate(resident):
            result = captured.step(batch(step))
            assert bits_equal(result.value, expected), (step, result.outcome)
        service.collect()
        service.slots.check()
        assert torch.equal(admission_of(service).table.cpu(), service.slots.table.table)
        counts = service.lookahead.counts()
        assert counts.guessed > 0
        assert counts.used <= counts.fetched
        booked = [
            service.metrics.value(f"ziggurat_lookahead_{name}_total")
            for name in ("guessed_rows", "wanted_rows", "fetched_bytes", "used_bytes")
        ]
        chunks = [count * CHUNK_BYTES for count in (counts.fetched, counts.used)]
        assert booked == [counts.guessed, counts.matched, *chunks]
        if arena == "100%":
            assert service.metrics.value("ziggurat_replay_passes_total") == 0
        print(pool, arena, counts)


@pytest.mark.parametrize("arena", ["100%", "60%"])
def test_churn(packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], arena: str) -> None:
    with looking_ahead(packs, model, "25%", arena=arena) as service:
        captured = Captured(model, service)
        with service.churn(seed=1) as churn:
            for step in range(CHURNED_STEPS):
                result = captured.step(batch(step % DIFFERENT))
                assert bits_equal(result.value, resident[step % DIFFERENT]), (step, result.outcome)
        assert min(churn.evicted, churn.filled) > 100
        print(arena, service.lookahead.counts())


def test_eager_steps_look_ahead_as_well(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]
) -> None:
    with looking_ahead(packs, model, "50%") as service:
        captured = Captured(model, service)
        captured.eager = True
        for step, expected in enumerate(resident):
            assert bits_equal(captured.step(batch(step)).value, expected)
        assert service.lookahead.counts().guessed > 0
