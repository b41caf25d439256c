"""The step protocol on a GPU: captured once, replayed for pools of any size, with threads at work meanwhile."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fake_moe import EXPERTS, HIDDEN, LAYERS, FakeModel, FakePacks, Moe, bits_equal, make_packs
from support.wrapped_packs import WrappedPack
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.factory import open_service
from ziggurat.residency.passes import PassMode, PassPath, StepResult, StepTokens
from ziggurat.residency.placement import Placement
from ziggurat.residency.ports import RowPack
from ziggurat.residency.service import ExpertService

pytestmark = pytest.mark.gpu

ROWS = LAYERS * EXPERTS
BATCH = 8  # rows of the captured batch
MAX_TOKENS = 600


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
    pack: RowPack | None = None,
    heat: Path | None = None,
    **options: Any,
) -> Iterator[ExpertService]:
    miss = options.pop("miss", {"mode": "replay", "max_replays": 2})
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs.paths[0].parent), "readers": 2},
                "host": {"size": arena, "numa": "none"},
                "device": {"size": pool, "device": "cuda:0"},
            },
            "codecs": {"base": packs.codec},
            "miss": miss,
            "heat": {"path": None if heat is None else str(heat)},
        }
    )
    place = Placement(torch.device("cuda", 0), torch.bfloat16, MAX_TOKENS)
    service = open_service(
        config, packs.geometry, pack or packs.open(), get_codec(packs.codec), place=place, **options
    )
    service.slots.pool.tensor.fill_(0xFF)  # NaN in every codec
    torch.cuda.synchronize()
    try:
        yield service
    finally:
        service.close()


class Captured:
    """The model as a graph over a batch of `rows` rows, captured while no step is running."""

    def __init__(self, model: FakeModel, service: ExpertService, rows: int = BATCH) -> None:
        self.model, self.service = model, service
        self.x = torch.zeros(rows, HIDDEN, device="cuda")
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.forward(self.x, service.moe)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # error mode: global
            self.out = model.forward(self.x, service.moe)
        self.paths: list[PassPath] = []

    def step(self, x: torch.Tensor, **tokens: Any) -> StepResult[torch.Tensor]:
        """x [live, H] on the host; rows of NaN follow."""
        live = len(x)
        self.x.fill_(float("nan"))
        self.x[:live].copy_(x)
        self.paths = []

        def forward(path: PassPath) -> torch.Tensor:
            self.paths.append(path)
            if path is PassPath.EAGER:
                return self.model.forward(self.x, self.service.moe)[:live].clone()
            self.graph.replay()
            return self.out[:live].clone()

        return self.service.run_step(forward, StepTokens(live, **tokens))


def inputs(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


STEPS = [(1, 0), (8, 1), (3, 2), (8, 1), (5, 4), (1, 0)]


@pytest.fixture(scope="module")
def resident(packs: FakePacks, model: FakeModel) -> list[torch.Tensor]:
    """What the all-resident pool answers to STEPS."""
    with opened(packs, "100%") as service:
        assert service.warm_start().pool_rows == ROWS
        captured = Captured(model, service)
        results = [captured.step(inputs(*step)) for step in STEPS]
        assert [(one.outcome, one.passes) for one in results] == [("clean", 1)] * len(STEPS)
        service.collect()
        pairs = sum(tokens for tokens, _ in STEPS) * 3 * LAYERS
        assert service.metrics.value("ziggurat_routed_pairs_total") == pairs
        assert service.metrics.value("ziggurat_missed_pairs_total") == 0
        return [one.value.cpu() for one in results]


def test_the_resident_pool_is_right(packs: FakePacks, resident: list[torch.Tensor]) -> None:
    """Against the CPU; a near tie in the routing may send a token elsewhere, but not many."""
    on_cpu = FakeModel.make(dtype=torch.bfloat16)
    close = [
        torch.linalg.norm(one - other) <= 0.05 * torch.linalg.norm(other)
        for (tokens, seed), found in zip(STEPS, resident, strict=True)
        for one, other in zip(found, packs.reference(on_cpu, inputs(tokens, seed)), strict=True)
    ]
    assert sum(close) >= 0.6 * len(close), close


@pytest.mark.parametrize("arena", ["100%", "3 rows", "0"])
@pytest.mark.parametrize("pool", ["100%", "50%", "25%", "19%", "4 rows", "1 rows"])
def test_pools_of_any_size(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], pool: str, arena: str
) -> None:
    with opened(packs, pool, arena=arena, slot_seed=5) as service:
        assert service.mode is PassMode.REPLAY
        captured = Captured(model, service)
        missed = 0
        for step, expected in zip(STEPS, resident, strict=True):
            result = captured.step(inputs(*step))
            assert bits_equal(result.value.cpu(), expected), (step, result.outcome)
            assert captured.paths[0] is PassPath.GRAPH
            missed += result.misses_first_pass
            service.slots.check()
            service.cache.check()
        assert missed > 0


def test_one_graph_serves_pools_of_any_size(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]
) -> None:
    with opened(packs, "100%") as service:
        captured = Captured(model, service)
        for slots, seed in ((12, 1), (48, 2), (4, 3), (1, 4)):
            service.resize(slots, slot_seed=seed)
            for step, expected in zip(STEPS, resident, strict=True):
                assert bits_equal(captured.step(inputs(*step)).value.cpu(), expected), (slots, step)


@pytest.mark.parametrize("tokens", [40, 300, 600])
@pytest.mark.parametrize("pool", ["25%", "4 rows"])
def test_eager_prompts(packs: FakePacks, model: FakeModel, pool: str, tokens: int) -> None:
    """A batch that no graph was captured for: the same bits as in an all-resident pool, which misses nothing."""
    x = inputs(tokens, 7).cuda()
    answers = []
    for size in ("100%", pool):
        with opened(packs, size) as service:
            if size == "100%":
                service.warm_start()
            step = StepTokens(tokens, torch.arange(tokens).numpy() < tokens - 5, eager=True)

            def forward(path: PassPath, moe: Moe = service.moe) -> torch.Tensor:
                return model.forward(x, moe)

            result = service.run_step(forward, step)
            assert result.outcome == "clean"
            answers.append(result.value.cpu())
    assert bits_equal(*answers)


def test_without_replay_results_differ(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]
) -> None:
    with opened(packs, "25%", replay_enabled=False) as service:
        result = Captured(model, service).step(inputs(*STEPS[1]))
        assert result.outcome == "tolerated"
        assert not bits_equal(result.value.cpu(), resident[1])
        assert torch.isfinite(result.value).all(), "a missing expert contributes zero, not pool garbage"


@pytest.mark.parametrize("paused", [False, True])
def test_a_capture_beside_a_filling_thread(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor], tmp_path: Path, paused: bool
) -> None:
    """The thread reads rows into locked memory while a graph is captured in the strictest error mode."""
    with opened(packs, "25%", heat=tmp_path) as service:
        captured = Captured(model, service)
        for step in STEPS:
            captured.step(inputs(*step))
    pack = WrappedPack(packs.open())
    reading = threading.Event()
    filled: list[int] = []

    def slowly(key: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            filled.append(key)
            time.sleep(0.02)

    pack.before = slowly
    with opened(packs, "4 rows", pack=pack, heat=tmp_path) as service:
        service.warm_start()
        assert reading.wait(20)
        if paused:
            with service.paused():
                before = len(filled)
                captured = Captured(model, service)
                assert len(filled) == before
        else:
            before = len(filled)
            captured = Captured(model, service)
            while len(filled) == before and len(filled) < 10:
                time.sleep(0.01)
        for step, expected in zip(STEPS, resident, strict=True):
            assert bits_equal(captured.step(inputs(*step)).value.cpu(), expected)
        service.preheated()


def test_captures_after_steps_and_steps_after_captures(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]
) -> None:
    """A second batch size is captured when the pool, the table and the late books are in use."""
    with opened(packs, "100%") as service:
        service.warm_start()
        first = Captured(model, service)
        first.step(inputs(*STEPS[1]))
        with service.paused():
            second = Captured(model, service, rows=16)
        for step, expected in zip(STEPS, resident, strict=True):
            assert bits_equal(first.step(inputs(*step)).value.cpu(), expected)
        wide = second.step(inputs(16, 11)).value.cpu()
        assert torch.isfinite(wide).all()
        assert bits_equal(wide, second.step(inputs(16, 11)).value.cpu())


def test_a_row_that_cannot_be_read_fails_its_tokens_only(
    packs: FakePacks, model: FakeModel, resident: list[torch.Tensor]
) -> None:
    pack = WrappedPack(packs.open())
    with opened(packs, "100%", pack=pack) as service:
        captured = Captured(model, service)
        pack.failing = dict.fromkeys((3 * EXPERTS, 3 * EXPERTS + 1), "io")  # of the last layer
        result = captured.step(inputs(*STEPS[1]))
        assert result.outcome == "failed"
        assert result.failed_tokens is not None
        kept = torch.from_numpy(~result.failed_tokens)
        assert 0 < int(kept.sum()) < 8
        assert bits_equal(result.value.cpu()[kept], resident[1][kept])
        pack.failing = {}
        assert bits_equal(captured.step(inputs(*STEPS[1])).value.cpu(), resident[1])


def test_a_token_does_not_see_its_batch(packs: FakePacks, model: FakeModel) -> None:
    """Position, neighbours and padding: in this model everything outside the experts works row by row."""
    x = inputs(8, 21)
    with opened(packs, "25%") as service:
        captured = Captured(model, service)
        together = captured.step(x).value.cpu()
        order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
        shuffled = captured.step(x[order]).value.cpu()
        alone = torch.cat([captured.step(x[i : i + 1]).value.cpu() for i in range(8)])
    assert bits_equal(together[order], shuffled)
    assert bits_equal(together, alone)
