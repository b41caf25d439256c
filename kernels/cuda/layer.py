"""Mixture-of-Experts layers on a CUDA device: the launches of one layer, and the memory between them.

A layer is four kernels: route (from ids to a list of work, activations to operand form), gate and up with the SwiGLU
behind them, down, combine. Each may start while the one before it ends and waits itself (programmatic dependent
launch). A layer that is admitted makes its experts resident in route, and has a fifth kernel behind that, which copies
their rows. Nothing here waits for the device, and nothing but the result is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ziggurat.kernels.admission import Admission
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.cuda import driver, library, workspace
from ziggurat.kernels.cuda.admission import (
    GATHER_BLOCKS,
    GATHER_THREADS,
    AdmissionParams,
    AdmittedLayers,
    mapped_address,
)
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.launch import Kernel
from ziggurat.kernels.cuda.lookahead import AheadLayers, AheadParams
from ziggurat.kernels.cuda.params import LayerParams, Mode
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.lookahead import Guess, Lookahead

#: Pairs that an expert gets on average up to which the decode GEMMs run: they take 8 pairs at a time, and every 8 more
#: read the expert's row once more.
DECODE_PAIRS_PER_EXPERT: Final = 8

_DECODE_THREADS: Final = 128
_PREFILL_THREADS: Final = 256
_PREFILL_PAIRS: Final = 64
_COMBINE_THREADS: Final = 128
_ROUTE_WARPS: Final = 32
_HOST_DECIDES: Final = AdmissionParams()
_NOTHING_GUESSED: Final = AheadParams()
_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_IO: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}
# Bytes of a decode warp's ring of two stages: Ring::BYTES in src/decode.cuh.
_RING: Final = {"w2": 2 * 8 * (512 + 64), "fp4": 2 * 4 * (1024 + 64), "bf16": 0}


def decode_shared(codec: str) -> int:
    """Dynamic shared memory of a block of the decode GEMMs, in bytes."""
    return _DECODE_THREADS // 32 * _RING[codec]


class KernelSource(Protocol):
    """Where kernels come from: the images of this package, or a library compiled by a test."""

    def kernel(self, name: str, device: int) -> Kernel: ...


class _Images:
    def kernel(self, name: str, device: int) -> Kernel:
        return library.kernel(name, device)


@dataclass(frozen=True, slots=True)
class _Gemms:
    """The two GEMMs of decode or prefill calls, how they are launched and how many blocks fill the device."""

    gate_up: Kernel
    down: Kernel
    threads: int
    shared: int
    entry_pairs: int
    gate_up_rows: int  # rows of the matrix that a unit of work computes
    down_rows: int
    gate_up_blocks: int
    down_blocks: int


class CudaLayerKernels:
    """LayerKernels on one CUDA device, for one codec and one shape of experts.

    codec: w2, fp4 or bf16. dtype: of activations, bfloat16 or float16 (bf16 rows: bfloat16 only). clamp: limit of the
    clamped SwiGLU. max_tokens: the largest batch; those that a workspace of moderate size does not hold are computed
    in parts of `part_tokens`. mx: MXFP8 activations and block-scaled matrix instructions; None: where the
    device has them (sm_120) and the codec has block scales.

    Raises LayerError for a shape or dtype the kernels cannot compute, UnsupportedGpuError where there is no image.
    """

    def __init__(
        self,
        codec: str,
        geometry: ExpertGeometry,
        experts: int,
        top_k: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        clamp: float | None = None,
        mx: bool | None = None,
        source: KernelSource | None = None,
    ) -> None:
        if dtype not in _IO or (codec == "bf16" and dtype is not torch.bfloat16):
            wanted = "bfloat16" if codec == "bf16" else "bfloat16 or float16"
            raise LayerError(
                f"{codec} experts need {wanted} activations on a GPU, not {dtype}: set --dtype accordingly"
            )
        workspace.check_shape(geometry, experts, top_k)
        self.geometry = geometry
        self.experts = experts
        self.top_k = top_k
        self.dtype = dtype
        self.device = torch.device(
            "cuda", device.index if device.index is not None else torch.cuda.current_device()
        )
        self.max_tokens = max_tokens
        index = self.device.index
        self.mx = (driver.capability(index)[0] == 12 and codec != "bf16") if mx is None else mx
        self.part_tokens = workspace.part_tokens(geometry, top_k, max_tokens, workspace.PARTIAL_BYTES)
        self._small_tokens = workspace.SMALL_ROUTE_PAIRS // top_k
        self._decode_tokens = max(1, DECODE_PAIRS_PER_EXPERT * experts // top_k)
        self._load(codec, index, source or _Images())
        self._params = self._workspace(codec)
        self._params.limit = math.inf if clamp is None else clamp
        self._admitted: AdmittedLayers | None = None
        self._ahead: AheadLayers | None = None

    def _load(self, codec: str, index: int, source: KernelSource) -> None:
        """Every kernel, so that nothing is loaded during a capture."""
        io = _IO[self.dtype]
        tail = "_mx" if self.mx else ""
        route = "plain" if codec == "bf16" else io + tail
        gemm = f"{codec}_{io}{tail}"
        multiprocessors = driver.attribute(index, "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")

        def gemms(
            kind: str, threads: int, shared: int, pairs: int, gate_up_rows: int, down_rows: int
        ) -> _Gemms:
            both = [source.kernel(f"{name}_{kind}_{gemm}", index) for name in ("gate_up", "down")]
            blocks = [multiprocessors * max(1, k.blocks_per_multiprocessor(threads, shared)) for k in both]
            return _Gemms(
                both[0], both[1], threads, shared, pairs, gate_up_rows, down_rows, blocks[0], blocks[1]
            )

        ring = decode_shared(codec)
        tiles = 2 if codec == "bf16" else 4  # of a unit of work
        self._decode = gemms("decode", _DECODE_THREADS, ring, workspace.DECODE_PAIRS, 8 * tiles, 16 * tiles)
        self._prefill = gemms("prefill", _PREFILL_THREADS, 0, _PREFILL_PAIRS, 128, 256)
        self._small_route = source.kernel(f"route_small_{route}", index)
        self._large_route = source.kernel(f"route_large_{route}", index)
        self._large_route_shared = (_ROUTE_WARPS + 5) * self.experts * 4
        self._large_route.reserve_shared(self._large_route_shared)
        self._combine = source.kernel(f"combine_{io}", index)
        self._gather = source.kernel("gather_missing", index)
        self._gather_ahead = source.kernel("gather_ahead", index)
        self._choice = source.kernel("choose_guesses", index)
        self._fetch = source.kernel("fetch_guesses", index)

    def _workspace(self, codec: str) -> LayerParams:
        g = self.geometry
        items = workspace.workspace_items(g, self.experts, self.top_k, self.part_tokens)
        self._memory = {
            name: torch.empty(count, dtype=_OF_SIZE[size], device=self.device)
            for name, (count, size) in items.items()
        }
        params = LayerParams()
        for name, tensor in self._memory.items():
            setattr(params, name, tensor.data_ptr())
        sections = get_codec(codec).sections(g)
        offsets = {section.name: section.offset for section in sections}
        params.w13_scales = offsets.get("w13 scales", 0)
        params.w2_codes = offsets["w2 codes"] if "w2 codes" in offsets else offsets["w2"]
        params.w2_scales = offsets.get("w2 scales", 0)
        params.top_k, params.experts = self.top_k, self.experts
        params.hidden_size, params.inter = g.hidden, g.intermediate
        return params

    @property
    def workspace_bytes(self) -> int:
        """Device memory held between the kernels of a layer; all layers share it."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def poison(self) -> None:
        """Fill the workspace with NaN patterns, so that a test sees what is read without having been written."""
        for tensor in self._memory.values():
            tensor.view(torch.uint8).fill_(0xFF)

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        slots: torch.Tensor,
        pool: torch.Tensor,
        live: torch.Tensor,
        prefill: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        tally: torch.Tensor | None = None,
        admission: Admission | None = None,
        layer: int = 0,
        lookahead: Lookahead | None = None,
        guess: Guess | None = None,
    ) -> torch.Tensor:
        """A whole layer: x [T, H] -> [T, H]; experts without a slot contribute zero. See residency's LayerKernels."""
        x, topk_weights, topk_ids = self._checked(x, topk_weights, topk_ids)
        p = self._params
        p.admission = (
            _HOST_DECIDES if admission is None else self._admission(admission, layer, x, slots, pool)
        )
        ahead = None if lookahead is None else self._looking_ahead(lookahead, admission, layer)
        p.ahead = _NOTHING_GUESSED if ahead is None else ahead.view(layer)
        guesses = None if ahead is None or guess is None else ahead.ask(guess, x)
        out = torch.empty_like(x)
        p.slots, p.live, p.mode = slots.data_ptr(), live.data_ptr(), Mode.WHOLE
        p.pool, p.stride = pool.data_ptr(), pool.stride(0)
        p.counts = None if counts is None else counts.data_ptr()
        p.tally = None if tally is None else tally.data_ptr()
        tokens = x.shape[0]
        gemms = self._gemms(tokens)
        for first in range(0, tokens, self.part_tokens):
            count = min(self.part_tokens, tokens - first)
            self._point_at(x, topk_weights, topk_ids, first, count)
            p.direct = tokens == 1 and admission is None
            p.prefill = None if prefill is None else prefill.data_ptr() + first
            self._route(gemms, count, count)
            if admission is not None:
                gather = self._gather if ahead is None else self._gather_ahead
                gather.launch(GATHER_BLOCKS, GATHER_THREADS, p, dependent=True)
            if ahead is not None and guesses is not None:
                ahead.fetch(layer + 1, guesses, live)
            self._multiply(gemms, count)
            self._sum(out, first, count)
        if ahead is not None:
            ahead.join(layer)
        return out

    def _admission(
        self, admission: Admission, layer: int, x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
    ) -> AdmissionParams:
        if x.shape[0] > self.part_tokens:
            raise LayerError(
                f"{x.shape[0]} tokens in an admitted layer: the workspace holds {self.part_tokens}"
            )
        if self._admitted is None or self._admitted.admission is not admission:
            arena = mapped_address(admission.arena, self.device.index)
            self._admitted = AdmittedLayers(admission, self.experts, arena)
        return self._admitted.view(layer, slots, pool)

    def _looking_ahead(self, lookahead: Lookahead, admission: Admission | None, layer: int) -> AheadLayers:
        """For the admission that `_admission` was asked about last."""
        admitted = self._admitted
        if admission is None or admitted is None:
            raise LayerError("only layers that are admitted look ahead")
        if self._ahead is None or self._ahead.lookahead is not lookahead:
            self._ahead = AheadLayers(
                lookahead, admitted.of, admission.layers, self.experts, self._choice, self._fetch
            )
        if layer == admission.first:
            self._ahead.forget()
        return self._ahead

    def settle(self) -> None:
        """Wait until no row is fetched any more for a layer that did not come: after a pass that broke off."""
        if self._ahead is not None:
            self._ahead.settle()

    def begin(self, x: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor) -> None:
        """Start a layer that is computed in several chunks of experts. At most `part_tokens` tokens."""
        p = self._params
        if x.shape[0] > self.part_tokens:
            raise LayerError(f"{x.shape[0]} tokens at once: the workspace holds {self.part_tokens}")
        x, _, topk_ids = self._checked(x, None, topk_ids)
        p.live, p.mode, p.direct = live.data_ptr(), Mode.BEGIN, 0
        p.admission = _HOST_DECIDES
        self._point_at(x, None, topk_ids, 0, x.shape[0])
        self._route(self._gemms(x.shape[0]), x.shape[0], x.shape[0])

    def add(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor,
        *,
        slots: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        """Compute the experts that have a slot in `slots`; each expert in exactly one chunk."""
        p = self._params
        x, _, topk_ids = self._checked(x, None, topk_ids)
        p.slots, p.live, p.mode, p.direct = slots.data_ptr(), live.data_ptr(), Mode.ADD, 0
        p.admission = _HOST_DECIDES
        p.pool, p.stride = pool.data_ptr(), pool.stride(0)
        self._point_at(x, None, topk_ids, 0, x.shape[0])
        gemms = self._gemms(x.shape[0])
        self._route(gemms, x.shape[0], 0)
        self._multiply(gemms, x.shape[0])

    def finish(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sums of what was added: [T, H]."""
        p = self._params
        x, topk_weights, topk_ids = self._checked(x, topk_weights, topk_ids)
        p.live = live.data_ptr()
        self._point_at(x, topk_weights, topk_ids, 0, x.shape[0])
        out = torch.empty_like(x)
        self._sum(out, 0, x.shape[0])
        return out

    def _checked(
        self, x: torch.Tensor, topk_weights: torch.Tensor | None, topk_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if x.dtype is not self.dtype or x.dim() != 2 or x.shape[1] != self.geometry.hidden:
            raise LayerError(
                f"activations are {x.dtype} {tuple(x.shape)}, expected {self.dtype} [tokens, {self.geometry.hidden}]"
            )
        if tuple(topk_ids.shape) != (x.shape[0], self.top_k):
            raise LayerError(f"topk_ids is {tuple(topk_ids.shape)}, expected {(x.shape[0], self.top_k)}")
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.to(torch.int64)
        if topk_weights is None:
            topk_weights = x  # not looked at
        elif topk_weights.dtype is not torch.float32:
            topk_weights = topk_weights.float()
        return x.contiguous(), topk_weights.contiguous(), topk_ids.contiguous()

    def _gemms(self, tokens: int) -> _Gemms:
        return self._decode if tokens <= self._decode_tokens else self._prefill

    def _point_at(
        self, x: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor, first: int, count: int
    ) -> None:
        p = self._params
        p.x = x.data_ptr() + first * x.shape[1] * 2
        p.ids = ids.data_ptr() + first * self.top_k * ids.element_size()
        p.weights = None if weights is None else weights.data_ptr() + first * self.top_k * 4
        p.ids_are_64 = ids.dtype is torch.int64
        p.first, p.tokens = first, count

    def _route(self, gemms: _Gemms, tokens: int, prepared: int) -> None:
        """prepared: tokens whose activations are brought into operand form on the way."""
        small = tokens <= self._small_tokens and gemms is self._decode
        kernel = self._small_route if small else self._large_route
        self._params.entry_pairs = gemms.entry_pairs
        blocks = 1 if kernel.name.endswith("plain") else 1 + prepared
        kernel.launch(
            blocks, 256 if small else 1024, self._params, shared=0 if small else self._large_route_shared
        )

    def _multiply(self, gemms: _Gemms, tokens: int) -> None:
        g, pairs = self.geometry, tokens * self.top_k
        entries = min(pairs, self.experts + pairs // gemms.entry_pairs)  # at most
        for kernel, size, rows, blocks in (
            (gemms.gate_up, g.intermediate, gemms.gate_up_rows, gemms.gate_up_blocks),
            (gemms.down, g.hidden, gemms.down_rows, gemms.down_blocks),
        ):
            grid = max(1, min(blocks, entries * -(-size // rows)))
            kernel.launch(grid, gemms.threads, self._params, shared=gemms.shared, dependent=True)

    def _sum(self, out: torch.Tensor, first: int, count: int) -> None:
        if count == 0:
            return
        g = self.geometry
        self._params.out = out.data_ptr() + first * g.hidden * 2
        self._combine.launch(
            (-(-g.hidden // (4 * _COMBINE_THREADS)), count, 1), _COMBINE_THREADS, self._params, dependent=True
        )
