"""Layers whose rows the kernels of a GPU read in place, from the arena over the link."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_moe import EXPERTS, HIDDEN, LAYERS, FakeModel, FakePacks, bits_equal, make_packs
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import BudgetError
from ziggurat.residency.factory import open_service
from ziggurat.residency.passes import PassPath, StepResult, StepTokens
from ziggurat.residency.placement import Placement
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.gpu

BATCH = 8
STEPS = [(1, 0), (8, 1), (3, 2), (8, 1), (5, 4)]
PROMPT = (700, 5)


@pytest.fixture(scope="module", params=["bf16", "w2", "fp4"])
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    return make_packs(tmp_path_factory.mktemp(request.param), codec=request.param)


@pytest.fixture(scope="module")
def model() -> FakeModel:
    made = FakeModel.make(dtype=torch.bfloat16)
    return dataclasses.replace(made, router=made.router.cuda())


@contextmanager
def opened(
    packs: FakePacks, pool: str, direct: list[int], *, mode: str = "replay", **host: Any
) -> Iterator[ExpertService]:
    values: dict[str, Any] = {
        "tiers": {
            "disk": {"path": str(packs.paths[0].parent), "readers": 2},
            "host": {"size": "100%", "numa": "none", **host},
            "device": {"size": pool, "device": "cuda:0", "direct_layers": direct},
        },
        "codecs": {"base": packs.codec},
        "miss": {"mode": mode},
        "heat": {"path": None},
    }
    place = Placement(torch.device("cuda", 0), torch.bfloat16, 1024)
    service = open_service(
        TiersConfig.from_mapping(values), packs.geometry, packs.open(), get_codec(packs.codec), place=place
    )
    service.slots.pool.tensor.fill_(0xFF)  # NaN in every codec
    torch.cuda.synchronize()
    try:
        yield service
    finally:
        service.close()


class Captured:
    """The model as a graph over BATCH rows."""

    def __init__(self, model: FakeModel, service: ExpertService) -> None:
        self.model, self.service = model, service
        self.x = torch.zeros(BATCH, HIDDEN, device="cuda")
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.forward(self.x, service.moe)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = model.forward(self.x, service.moe)

    def step(self, tokens: int, seed: int) -> StepResult[torch.Tensor]:
        self.x.fill_(float("nan"))
        self.x[:tokens].copy_(inputs(tokens, seed))

        def forward(path: PassPath) -> torch.Tensor:
            if path is PassPath.EAGER:
                return self.model.forward(self.x, self.service.moe)[:tokens].clone()
            self.graph.replay()
            return self.out[:tokens].clone()

        return self.service.run_step(forward, StepTokens(tokens))

    def prompt(self, tokens: int, seed: int) -> StepResult[torch.Tensor]:
        x = inputs(tokens, seed).cuda()

        def forward(path: PassPath) -> torch.Tensor:
            return self.model.forward(x, self.service.moe)

        return self.service.run_step(forward, StepTokens(tokens, np.ones(tokens, dtype=np.bool_), eager=True))


def inputs(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def resident(packs: FakePacks, model: FakeModel) -> list[torch.Tensor]:
    with opened(packs, "100%", []) as service:
        service.warm_start()
        captured = Captured(model, service)
        values = [captured.step(*step).value.cpu() for step in STEPS]
        return [*values, captured.prompt(*PROMPT).value.cpu()]


@pytest.mark.parametrize("mode", ["replay", "auto"])
@pytest.mark.parametrize("pool", ["100%", "25%", "4 rows", "1 rows"])
@pytest.mark.parametrize("direct", [[0], [1, 3], [*range(LAYERS)]], ids=str)
def test_layers_in_place_have_the_bits_of_the_resident_pool(
    packs: FakePacks,
    model: FakeModel,
    resident: list[torch.Tensor],
    direct: list[int],
    pool: str,
    mode: str,
) -> None:
    with opened(packs, pool, direct, mode=mode) as service:
        captured = Captured(model, service)
        for _ in range(2):
            for step, expected in zip(STEPS, resident, strict=False):
                result = captured.step(*step)
                assert bits_equal(result.value.cpu(), expected), (step, result.outcome)
                if len(direct) == LAYERS:
                    assert (result.misses_first_pass, result.passes) == (0, 1)
            assert bits_equal(captured.prompt(*PROMPT).value.cpu(), resident[-1])
        assert not {key // EXPERTS for key in service.slots.held()} & set(direct)
        service.slots.check()
        service.cache.check()


def test_an_arena_that_is_not_pinned_is_refused_by_name(packs: FakePacks) -> None:
    with (
        pytest.raises(BudgetError, match=r"tiers\.device\.direct_layers"),
        opened(packs, "25%", [1], size="0"),
    ):
        pass
