"""Prompts that stream past the pool of a GPU, between steps that replay a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_moe import EXPERTS, HIDDEN, LAYERS, FakeModel, FakePacks, bits_equal, make_packs
from support.wrapped_packs import WrappedPack
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.factory import open_service
from ziggurat.residency.passes import PassPath, StepResult, StepTokens
from ziggurat.residency.placement import Placement
from ziggurat.residency.ports import RowPack
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.gpu

MAX_TOKENS = 2048
SHAPES = [(600, 0), (2048, 1), (40, 2), (1200, 3)]  # tokens and seed of prompts


@pytest.fixture(scope="module", params=["bf16", "w2", "fp4"])
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    return make_packs(tmp_path_factory.mktemp(request.param), codec=request.param)


@pytest.fixture(scope="module")
def model() -> FakeModel:
    made = FakeModel.make(dtype=torch.bfloat16)
    return dataclasses.replace(made, router=made.router.cuda())


@contextmanager
def opened(
    packs: FakePacks,
    pool: str,
    *,
    arena: str = "100%",
    staging: str = "auto",
    mode: str = "replay",
    pack: RowPack | None = None,
) -> Iterator[ExpertService]:
    values: dict[str, Any] = {
        "tiers": {
            "disk": {"path": str(packs.paths[0].parent), "readers": 2},
            "host": {"size": arena, "numa": "none"},
            "device": {"size": pool, "device": "cuda:0", "staging": staging},
        },
        "codecs": {"base": packs.codec},
        "miss": {"mode": mode},
        "heat": {"path": None},
    }
    place = Placement(torch.device("cuda", 0), torch.bfloat16, MAX_TOKENS)
    service = open_service(
        TiersConfig.from_mapping(values),
        packs.geometry,
        pack or packs.open(),
        get_codec(packs.codec),
        place=place,
    )
    service.slots.pool.tensor.fill_(0xFF)  # NaN in every codec
    torch.cuda.synchronize()
    try:
        yield service
    finally:
        service.close()


def run(
    model: FakeModel, service: ExpertService, tokens: int, seed: int, *, prompt: bool
) -> StepResult[torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).cuda()

    def forward(path: PassPath) -> torch.Tensor:
        return model.forward(x, service.moe)

    flags = np.ones(tokens, dtype=np.bool_) if prompt else None
    return service.run_step(forward, StepTokens(tokens, flags, eager=prompt))


@pytest.fixture(scope="module")
def resident(packs: FakePacks, model: FakeModel) -> dict[tuple[int, int], torch.Tensor]:
    """What a pool with every row answers."""
    with opened(packs, "100%") as service:
        service.warm_start()
        return {
            shape: run(model, service, *shape, prompt=True).value.cpu()
            for shape in [*SHAPES, *((3, seed) for seed in range(9))]
        }


@pytest.mark.parametrize("staging", ["auto", "2 rows", "5 rows", "20 rows"])
@pytest.mark.parametrize(
    ("pool", "arena"), [("25%", "100%"), ("25%", "5 rows"), ("1 rows", "100%"), ("4 rows", "0")]
)
def test_prompts_between_decoding_have_the_bits_of_the_resident_pool(
    packs: FakePacks,
    model: FakeModel,
    resident: dict[tuple[int, int], torch.Tensor],
    pool: str,
    arena: str,
    staging: str,
) -> None:
    with opened(packs, pool, arena=arena, staging=staging) as service:
        for turn in range(3):
            for number, shape in enumerate(SHAPES):
                result = run(model, service, *shape, prompt=True)
                assert result.outcome == "clean"
                assert bits_equal(result.value.cpu(), resident[shape]), (turn, shape)
                decoded = (3, (turn * len(SHAPES) + number) % 9)
                value = run(model, service, *decoded, prompt=False).value.cpu()
                assert bits_equal(value, resident[decoded])
            service.slots.check()
            service.cache.check()
        streamed = [
            service.metrics.value("ziggurat_fetched_rows_total", source, "staging")
            for source in ("arena", "pack")
        ]
        assert sum(streamed) > 0


def test_a_prompt_leaves_a_full_pool_as_it_is(packs: FakePacks, model: FakeModel) -> None:
    with opened(packs, "25%") as service:
        for seed in range(9):
            run(model, service, 3, seed, prompt=False)
        assert not service.slots.free
        table = service.slots.table.numpy.copy()
        run(model, service, 2048, 1, prompt=True)
        assert np.array_equal(service.slots.table.numpy, table)


def test_a_row_that_cannot_be_read_fails_the_tokens_of_a_prompt_only(
    packs: FakePacks, model: FakeModel, resident: dict[tuple[int, int], torch.Tensor]
) -> None:
    pack = WrappedPack(packs.open())
    with opened(packs, "25%", arena="0", pack=pack) as service:
        for seed in range(9):
            run(model, service, 3, seed, prompt=False)
        last = (LAYERS - 1) * EXPERTS
        lost = next(key for key in range(last, last + EXPERTS) if service.slots.table.slot_of(key) < 0)
        pack.failing[lost] = "io"
        shape = SHAPES[0]
        result = run(model, service, *shape, prompt=True)
        assert [(one.layer_id, one.expert) for one in result.failures] == [(LAYERS - 1, lost - last)]
        assert result.failed_tokens is not None
        kept = torch.from_numpy(~result.failed_tokens)
        assert 0 < int(kept.sum()) < shape[0]
        assert bits_equal(result.value.cpu()[kept], resident[shape][kept])
        pack.failing.clear()
        assert bits_equal(run(model, service, *shape, prompt=True).value.cpu(), resident[shape])
