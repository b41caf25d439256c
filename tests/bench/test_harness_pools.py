"""Pools of every size give the same bits through the step protocol, in eager code and replayed as a CUDA graph.

On the CPU the device's arithmetic has a twin behind the same calls, so all but the graph is tested without a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence

import pytest
import torch

from bench.harness.measure import Run, Tiers, run_steps, service_over
from bench.harness.routing import Routing, synthetic
from bench.harness.rows import MemoryPack
from bench.harness.stack import Forward, Stack
from bench.shapes import MoeShape
from ziggurat.residency.passes import PassMode
from ziggurat.residency.service import StepTokens
from ziggurat.stores.pack import RowRequest, RowResult

SHAPE = MoeShape("small", layers=4, experts=16, top_k=4, hidden=256, intermediate=128)
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=pytest.mark.gpu),
]
#: 100, 50, 25 and 19 % of the experts, and fewer rows than one layer routes to.
SLOTS = (64, 32, 16, 12, 3)


def routing_for(tokens: int, steps: int = 10) -> Routing:
    return synthetic(steps, SHAPE.layers, SHAPE.experts, SHAPE.top_k, tokens, zipf=1.2, drift=0.3)


def run_at(slots: int, routing: Routing, codec: str, device: torch.device, mode: str = "replay") -> Run:
    pack = MemoryPack(SHAPE, codec, distinct=23)
    tiers = Tiers(slots, 8 + SHAPE.rows, device, routing.tokens, {"mode": mode})
    with service_over(pack, SHAPE, tiers) as service:
        assert service.mode is PassMode(mode)
        stack = Stack(routing, SHAPE.hidden, device)
        return run_steps(service, stack, routing, warm=2, graph=device.type == "cuda" and mode == "replay")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", ["w2", "fp4", "bf16"])
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_every_pool_gives_the_same_bits(codec: str, tokens: int, device: torch.device) -> None:
    routing = routing_for(tokens)
    runs = {slots: run_at(slots, routing, codec, device) for slots in SLOTS}
    full = runs[SLOTS[0]]
    assert full.outcomes == {"clean": 8}
    assert float(torch.stack(full.outputs).float().std()) > 0.1
    for slots, run in runs.items():
        assert run.same_bits(full), f"{slots} slots"
    assert sum(runs[12].misses) > 0
    assert runs[3].outcomes == {"exact": 8}


@pytest.mark.parametrize("device", DEVICES)
def test_replay_and_inline_passes_give_the_same_bits(device: torch.device) -> None:
    routing = routing_for(3)
    replayed, inline = (run_at(40, routing, "w2", device, mode) for mode in ("replay", "inline"))
    assert replayed.outcomes["replayed"] > 0
    assert inline.outcomes == {"inline": 8}
    assert replayed.same_bits(inline)


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_run_has_the_same_bits(device: torch.device) -> None:
    routing = routing_for(4)
    assert run_at(12, routing, "fp4", device).same_bits(run_at(12, routing, "fp4", device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_alone_has_the_bits_it_has_in_company(device: torch.device) -> None:
    """One sequence of a batch, decoded by itself: routing and inputs are those of its place in the batch."""
    routing = routing_for(8)
    together = run_at(16, routing, "w2", device)
    pack = MemoryPack(SHAPE, "w2", distinct=23)
    for token in (0, 5):
        alone = Routing(routing.ids[:, :, token : token + 1], routing.experts, "one sequence")
        stack = Stack(routing, SHAPE.hidden, device).of_token(token)
        with service_over(pack, SHAPE, Tiers(12, 72, device, 1, {"mode": "replay"})) as service:
            run = run_steps(service, stack, alone, warm=2, graph=device.type == "cuda")
        for one, many in zip(run.outputs, together.outputs, strict=True):
            assert torch.equal(one[0].view(torch.int16), many[token].view(torch.int16))


class SlowPack(MemoryPack):
    """Tells when rows are being read, and takes its time."""

    def __init__(self, shape: MoeShape, codec: str, distinct: int) -> None:
        super().__init__(shape, codec, distinct)
        self.reading = threading.Event()
        self.pause = 0.0

    def read_rows(self, wanted: Sequence[RowRequest]) -> Generator[RowResult, None, None]:
        for result in super().read_rows(wanted):
            self.reading.set()
            time.sleep(self.pause)
            yield result


@pytest.mark.gpu
def test_a_thread_that_reads_rows_during_capture_does_no_harm() -> None:
    """The arena is being filled in the background while the stack is captured; nobody asks it to stop."""
    device = torch.device("cuda", 0)
    routing = routing_for(2)
    full = run_at(64, routing, "w2", device)
    pack = SlowPack(SHAPE, "w2", distinct=23)
    with service_over(pack, SHAPE, Tiers(16, 72, device, 2, {"mode": "replay"})) as service:
        service.heat.counts += 1.0
        pack.pause = 0.05
        service.warm_start()
        assert pack.reading.wait(10)
        stack = Stack(routing, SHAPE.hidden, device)
        forward = Forward(stack, service.moe)
        forward.capture()
        pack.pause = 0.0
        for step in range(2, routing.steps):
            stack.load(step)
            result = service.run_step(forward, StepTokens(2))
            assert torch.equal(result.value.view(torch.int16), full.outputs[step - 2].view(torch.int16))
