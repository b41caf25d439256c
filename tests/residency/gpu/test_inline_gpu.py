"""Layers that fetch their own rows inside captured graphs: the bits of the all-resident pool, whatever happens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from support.admissions import admission_of
from support.captured_moe import BATCH, DIFFERENT, Captured, batch, inputs, opened
from support.fake_moe import HIDDEN, LAYERS, FakeModel, FakePacks, bits_equal, make_packs
from ziggurat.residency.passes import PassPath, StepTokens
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.gpu

ROWS = LAYERS * 12
CHURNED_STEPS = 10_000
TOP_K = 3


@pytest.fixture(scope="module", params=["bf16", "w2", "fp4"])
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    return make_packs(tmp_path_factory.mktemp(request.param), codec=request.param)


@pytest.fixture(scope="module")
def model() -> FakeModel:
    made = FakeModel.make(dtype=torch.bfloat16)
    return dataclasses.replace(made, router=made.router.cuda())


@pytest.fixture(scope="module")
def resident(packs: FakePacks, model: FakeModel) -> list[torch.Tensor]:
    """What the all-resident pool answers, without any admission."""
    with opened(packs, "100%", mode="auto") as service:
        assert service.choice.serving == "replay"
        service.warm_start()
        captured = Captured(model, service)
        return [captured.step(batch(step)).value.clone() for step in range(DIFFERENT)]


@pytest.mark.parametrize("arena", ["100%", "50%", "7 rows"])
@pytest.mark.parametrize("pool", ["100%", "50%", "25%", "19%", "4 rows", "1 rows"])
def test_pools_and_arenas_of_any_size(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], pool: str, arena: str
) -> None:
    with opened(packs, pool, arena=arena, slot_seed=5) as service:
        assert service.choice.serving == "inline"
        service.warm_start()
        service.preheated()
        captured = Captured(model, service)
        outcomes = set()
        for step, expected in enumerate(resident):
            result = captured.step(batch(step))
            assert bits_equal(result.value, expected), (step, result.outcome)
            outcomes.add(result.outcome)
        service.collect()
        service.slots.check()
        admission = admission_of(service)
        assert torch.equal(admission.table.cpu(), service.slots.table.table)
        if arena == "100%":
            assert service.metrics.value("ziggurat_replay_passes_total") == 0
            assert outcomes <= {"inline", "streamed", "clean"}


def test_one_graph_serves_pools_of_any_size(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]
) -> None:
    with opened(packs, "100%") as service:
        captured = Captured(model, service)
        for slots, seed in ((24, 1), (ROWS, 2), (12, 3), (1, 4)):
            service.resize(slots, slot_seed=seed)
            service.warm_start()
            for step, expected in enumerate(resident[:12]):
                assert bits_equal(captured.step(batch(step)).value, expected), (slots, step)
            service.collect()
            service.slots.check()


@pytest.mark.parametrize("arena", ["100%", "60%"])
def test_churn(packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], arena: str) -> None:
    with opened(packs, "25%", arena=arena) as service:
        service.warm_start()
        service.preheated()
        captured = Captured(model, service)
        outcomes: dict[str, int] = {}
        with service.churn(seed=1) as churn:
            for step in range(CHURNED_STEPS):
                result = captured.step(batch(step % DIFFERENT))
                outcomes[result.outcome] = outcomes.get(result.outcome, 0) + 1
                assert bits_equal(result.value, resident[step % DIFFERENT]), (step, result.outcome)
        print(outcomes, churn.evicted, churn.filled)
        assert outcomes["replayed"] > 0
        if arena == "100%":  # in a smaller one, that a step finds everything there is a rare accident
            assert outcomes["inline"] > 0
        assert min(churn.evicted, churn.filled) > 100


@pytest.mark.parametrize("tokens", [40, 300, 600])
def test_prompts_between_decode_steps(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], tokens: int, tmp_path: Path
) -> None:
    x = inputs(tokens, 7)
    answers = []
    for mode, pool in (("auto", "100%"), ("inline", "25%")):
        with opened(packs, pool, mode=mode) as service:
            service.warm_start()
            service.preheated()
            captured = Captured(model, service)
            assert bits_equal(captured.step(batch(0)).value, resident[0])
            service.collect()
            before = service.slots.table.numpy.copy()

            def forward(path: PassPath, service: ExpertService = service) -> torch.Tensor:
                return model.forward(x, service.moe)

            step = StepTokens(tokens, np.arange(tokens) < tokens - 5, eager=True)
            result = service.run_step(forward, step)
            assert result.outcome == ("streamed" if mode == "inline" else "clean")
            answers.append(result.value.clone())
            assert (service.slots.table.numpy == before).all()
            for at, expected in enumerate(resident[:8]):
                assert bits_equal(captured.step(batch(at)).value, expected)
    assert bits_equal(*answers)


def test_eager_steps_admit_as_well(packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]) -> None:
    """Without any graph, as with --enforce-eager; the padded batch has the shape of the graph."""
    with opened(packs, "50%") as service:
        service.warm_start()
        service.preheated()
        padded = torch.full((BATCH, HIDDEN), float("nan"), device="cuda")
        for step, expected in enumerate(resident):
            x = batch(step)
            padded[: len(x)].copy_(x)
            result = service.run_step(
                lambda path: model.forward(padded, service.moe), StepTokens(len(x), eager=True)
            )
            assert result.outcome == "inline"
            assert bits_equal(result.value[: len(x)], expected)
