"""A tiny model as a captured graph over a service on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from support.fake_moe import HIDDEN, FakeModel, FakePacks
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.factory import open_service
from ziggurat.residency.passes import PassPath, StepResult, StepTokens
from ziggurat.residency.placement import Placement
from ziggurat.residency.service import ExpertService

BATCH = 4  # rows of the captured batch
MAX_TOKENS = 600
DIFFERENT = 50  # steps that repeat


@contextmanager
def opened(
    packs: FakePacks,
    pool: str,
    *,
    arena: str = "100%",
    mode: str = "inline",
    lookahead: int = 0,
    **options: Any,
) -> Iterator[ExpertService]:
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs.paths[0].parent), "readers": 2},
                "host": {"size": arena, "numa": "none"},
                "device": {"size": pool, "device": "cuda:0"},
            },
            "codecs": {"base": packs.codec},
            "miss": {"mode": mode, "lookahead": lookahead},
            "heat": {"path": None},
        }
    )
    place = Placement(torch.device("cuda", 0), torch.bfloat16, MAX_TOKENS)
    service = open_service(
        config, packs.geometry, packs.open(), get_codec(packs.codec), place=place, **options
    )
    service.slots.pool.tensor.fill_(0xFF)  # NaN in every codec
    torch.cuda.synchronize()
    try:
        yield service
    finally:
        service.close()


class Captured:
    """The model as a graph over a batch of BATCH rows, captured while no step is running."""

    def __init__(self, model: FakeModel, service: ExpertService) -> None:
        self.model, self.service = model, service
        self.eager = False  # whether steps run without the graph
        self.x = torch.zeros(BATCH, HIDDEN, device="cuda")
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.forward(self.x, service.moe)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with service.paused(), torch.cuda.graph(self.graph):
            self.out = model.forward(self.x, service.moe)

    def step(self, x: torch.Tensor, **tokens: Any) -> StepResult[torch.Tensor]:
        """x [live, H] on the device; rows of NaN follow."""
        live = len(x)
        self.x.fill_(float("nan"))
        self.x[:live].copy_(x)

        def forward(path: PassPath) -> torch.Tensor:
            if self.eager or path is PassPath.EAGER:
                return self.model.forward(self.x, self.service.moe)[:live].clone()
            self.graph.replay()
            return self.out[:live].clone()

        return self.service.run_step(forward, StepTokens(live, eager=self.eager, **tokens))


def inputs(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).cuda()


def batch(step: int) -> torch.Tensor:
    return inputs(1 + step % BATCH, step)
