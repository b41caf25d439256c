"""How kernels see a `Lookahead`, and the two that run beside a layer, on a stream of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch

from ziggurat.kernels.cuda.admission import GATHER_BLOCKS, GATHER_THREADS, AdmissionParams
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.launch import Kernel
from ziggurat.kernels.lookahead import CHUNK_BYTES, LANES, MOST_GUESSES, MOST_TOKENS, SPARES, Guess, Lookahead

#: Blocks that fetch what was guessed, up to LANES: fewer leave more of the device to the layers that run meanwhile.
FETCH_BLOCKS: Final = 24
_CHOICE_THREADS: Final = 256
_VECTOR: Final = 16  # bytes of one load
_LOADS: Final = 8  # of a thread, in flight


class AheadParams(ctypes.Structure):
    """`Ahead` of `src/params.cuh`, field by field; all zero: nobody looks ahead."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("spare", ctypes.c_void_p),
        ("spares", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("layers", ctypes.c_int32),
        ("layer", ctypes.c_int32),
    )


class GuessParams(ctypes.Structure):
    """`Guess` of `src/params.cuh`, field by field."""

    _fields_ = (
        ("admission", AdmissionParams),
        ("ahead", AheadParams),
        ("ids", ctypes.c_void_p),
        ("live", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("ids_are_64", ctypes.c_int32),
    )


def view_of(lookahead: Lookahead, layers: int, layer: int) -> AheadParams:
    """As layer number `layer` of `layers` sees it."""
    return AheadParams(
        lookahead.words.data_ptr(),
        lookahead.rows.data_ptr(),
        lookahead.progress.data_ptr(),
        lookahead.spare.data_ptr(),
        SPARES,
        LANES,
        layers,
        layer,
    )


class AheadLayers:
    """Looks ahead from layer to layer of one admission, on a branch that the stream of the layers forks and joins.

    A branch begins where a layer's input is known, goes on behind the layer's gather, whose rows come first, and ends
    in the layer that was guessed: so a graph that captures whole layers, one after the other, captures it too.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        views: Callable[[int], AdmissionParams],
        layers: int,
        experts: int,
        choice: Kernel,
        fetch: Kernel,
    ) -> None:
        """views: layer number -> the admission as that layer sees it.

        Raises LayerError for spares that rows cannot be copied to.
        """
        assert (GATHER_BLOCKS, GATHER_THREADS * _LOADS * _VECTOR) == (LANES, CHUNK_BYTES)
        if lookahead.spare.data_ptr() % _VECTOR or lookahead.spare.stride(0) % _VECTOR:
            raise LayerError(f"spares of {lookahead.spare.stride(0)} bytes: no multiple of {_VECTOR}")
        self.lookahead = lookahead
        self._views = views
        self._seen = [view_of(lookahead, layers, layer) for layer in range(layers)]
        self._choice, self._fetch = choice, fetch
        self._branch: Any = torch.cuda.Stream(lookahead.spare.device)
        self._ends: dict[int, Any] = {}  # layer -> event behind its fetch, until that layer has joined
        self._params = GuessParams()
        self._params.stride, self._params.experts = lookahead.spare.stride(0), experts

    def view(self, layer: int) -> AheadParams:
        """As layer number `layer` sees it."""
        return self._seen[layer]

    def ask(self, guess: Guess, x: torch.Tensor) -> torch.Tensor | None:
        """On the branch, from here on: what is guessed for the next layer from x [T, H]; None for too many tokens."""
        if x.shape[0] > MOST_TOKENS:
            return None
        self._branch.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._branch):
            ids = guess(x)
            if ids.dtype not in (torch.int32, torch.int64):
                ids = ids.to(torch.int64)
            ids = ids.contiguous()
        x.record_stream(self._branch)  # it may be read there when the layer has ended
        if ids.dim() != 2 or ids.shape[0] != x.shape[0] or not 1 <= ids.shape[1] <= MOST_GUESSES:
            raise LayerError(
                f"guesses are {tuple(ids.shape)}, expected {x.shape[0]} tokens with 1 to {MOST_GUESSES} each"
            )
        return ids

    def fetch(self, layer: int, ids: torch.Tensor, live: torch.Tensor) -> None:
        """On the branch, behind what is queued now: choose of the guesses ids [T, N] for layer number `layer`, and
        bring the rows."""
        p, branch = self._params, self._branch
        branch.wait_stream(torch.cuda.current_stream(live.device))
        p.admission, p.ahead = self._views(layer), self._seen[layer]
        p.ids, p.live, p.ids_are_64 = ids.data_ptr(), live.data_ptr(), ids.dtype is torch.int64
        p.tokens, p.width = ids.shape
        self._choice.launch(1, _CHOICE_THREADS, p, stream=branch.cuda_stream)
        self._fetch.launch(FETCH_BLOCKS, GATHER_THREADS, p, stream=branch.cuda_stream, dependent=True)
        self._ends[layer] = branch.record_event()

    def join(self, layer: int) -> None:
        """At the end of layer number `layer`: go on when the fetch for it has ended, which it called off."""
        end = self._ends.pop(layer, None)
        if end is not None:
            torch.cuda.current_stream(self.lookahead.spare.device).wait_event(end)

    def forget(self) -> None:
        """What a pass that broke off has left; its events belong to a graph that there is not."""
        self._ends.clear()

    def settle(self) -> None:
        """Wait on the host until nothing is fetched any more. Not during a capture."""
        self._branch.synchronize()
        self._ends.clear()
