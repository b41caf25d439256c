"""A stack of MoE layers without a model around them: routing comes from outside, everything else is a few cheap ops.

    h_l     = rms_norm(x_l)
    x_{l+1} = x_l + dense(h_l) + moe_l(h_l)

The inputs of a step lie in tensors whose addresses never change, so the whole stack can be captured once as a CUDA
graph and replayed for every step. The dense part stands for attention: a matrix of a given size is read in each layer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn.functional import rms_norm

from bench.harness.routing import IdArray, Routing
from ziggurat.kernels.lookahead import Guess
from ziggurat.residency.passes import PassPath

Moe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Different dense matrices, used in turn: together they have to be larger than a cache.
_DENSE_MATRICES = 8


class Stack:
    """The layers, their static inputs, and the inputs of every step.

    moe: (layer, x, weights, ids) -> result, as `ExpertService.moe`. hidden: H. dense_bytes: of each layer's dense
    matrix, 0 for none. dtype: of activations, bfloat16 or float16. guesses: of `bench.harness.guesses`, None = none.
    """

    def __init__(
        self,
        routing: Routing,
        hidden: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        dense_bytes: int = 0,
        seed: int = 0,
        guesses: IdArray | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        steps, layers, tokens, top_k = routing.ids.shape
        self.layers = layers
        self.tokens = tokens
        self.device = device
        self._ids = torch.from_numpy(routing.ids).to(device)
        self._guesses = None if guesses is None else torch.from_numpy(guesses).to(device)
        logits = torch.randn(steps, layers, tokens, top_k, generator=generator)
        self._weights = torch.softmax(logits, dim=-1).to(device)
        self._inputs = torch.randn(steps, tokens, hidden, generator=generator).to(device, dtype)
        self._make_static()
        width = max(hidden, dense_bytes // (hidden * dtype.itemsize)) if dense_bytes else 0
        self._dense = [
            (torch.randn(hidden, width, device=device) * hidden**-0.5).to(dtype)
            for _ in range(min(_DENSE_MATRICES, layers) if width else 0)
        ]

    def _make_static(self) -> None:
        """The tensors that a graph reads and writes."""
        self.ids = torch.zeros_like(self._ids[0])
        self.guesses = None if self._guesses is None else torch.zeros_like(self._guesses[0])
        self.weights = torch.zeros_like(self._weights[0])
        self.x = torch.zeros_like(self._inputs[0])
        self.out = torch.zeros_like(self.x)

    def of_token(self, token: int) -> Stack:
        """The same steps for one token of the batch alone."""
        alone = copy.copy(self)
        part = slice(token, token + 1)
        alone.tokens = 1
        alone._ids = self._ids[:, :, part].contiguous()
        alone._guesses = None if self._guesses is None else self._guesses[:, :, part].contiguous()
        alone._weights = self._weights[:, :, part].contiguous()
        alone._inputs = self._inputs[:, part].contiguous()
        alone._make_static()
        return alone

    def load(self, step: int) -> None:
        """Make `step` the one that the next forward computes."""
        self.ids.copy_(self._ids[step])
        if self._guesses is not None and self.guesses is not None:
            self.guesses.copy_(self._guesses[step])
        self.weights.copy_(self._weights[step])
        self.x.copy_(self._inputs[step])

    def guess(self, layer: int) -> Guess:
        """What layer number `layer` is guessed to be routed to in this step, int32 [T, N], whatever goes in."""
        assert self.guesses is not None
        here = self.guesses[layer]
        return lambda x: here

    def forward(self, moe: Moe) -> torch.Tensor:
        """The output of the last layer [T, H], in a tensor that the next forward overwrites."""
        return self.through(partial(self.layer, moe, number) for number in range(self.layers))

    def layer(self, moe: Moe, number: int, x: torch.Tensor) -> torch.Tensor:
        """What layer `number` makes of x [T, H]."""
        h = rms_norm(x, (x.shape[1],))
        y = moe(number, h, self.weights[number], self.ids[number])
        if self._dense:
            y = y + (h @ self._dense[number % len(self._dense)])[:, : x.shape[1]]
        return x + y

    def through(self, layers: Iterable[Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
        """As `forward`, through layers that somebody else has made."""
        x = self.x
        for layer in layers:
            x = layer(x)
        self.out.copy_(rms_norm(x, (x.shape[1],)))
        return self.out


class Forward:
    """A step's forward as a service calls it: the captured graph, or eager code where the service asks for it.

    Built without `graph` it runs eagerly always, as on a CPU.
    """

    def __init__(self, stack: Stack, moe: Moe) -> None:
        self._stack = stack
        self._moe = moe
        self.graph: torch.cuda.CUDAGraph | None = None
        self.called = 0.0  # when it was called last, by time.perf_counter

    def capture(self) -> None:
        """Capture the stack. The service must be outside a step and its background work paused."""
        side = torch.cuda.Stream(self._stack.device)
        side.wait_stream(torch.cuda.current_stream(self._stack.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._stack.forward(self._moe)
        torch.cuda.current_stream(self._stack.device).wait_stream(side)
        torch.cuda.synchronize(self._stack.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._stack.forward(self._moe)
        self.graph = graph

    def __call__(self, path: PassPath) -> torch.Tensor:
        self.called = time.perf_counter()
        if path is PassPath.GRAPH and self.graph is not None:
            self.graph.replay()
            return self._stack.out
        return self._stack.forward(self._moe)
