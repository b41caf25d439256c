"""A whole MoE layer on the CPU, with the contract of the device kernels.

It makes the logic that drives those kernels testable without a device: the same tensors, the same calls, the same
promises about padding, missing experts and counts. Bits are those of `ziggurat.kernels.cpu.moe` over decoded experts.
"""

from __future__ import annotations

import torch

from ziggurat.kernels.admission import Admission
from ziggurat.kernels.codecs.base import Codec
from ziggurat.kernels.cpu.admission import admit, copy_rows
from ziggurat.kernels.cpu.lookahead import choose, copy_rows_ahead, fetch
from ziggurat.kernels.cpu.moe import combine, expert_ffn
from ziggurat.kernels.errors import CodecError
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.lookahead import MOST_TOKENS, Guess, Lookahead

__all__ = ["CpuLayerKernels"]


class CpuLayerKernels:
    """MoE layers of one shape. Holds the contributions of the layer that `begin` started, nothing else.

    experts: E, routed experts of a layer. top_k: k, choices of a token. clamp: limit of the clamped SwiGLU.
    part_tokens: rows that `begin` takes at most.
    """

    def __init__(
        self,
        codec: Codec,
        geometry: ExpertGeometry,
        experts: int,
        top_k: int,
        *,
        clamp: float | None = None,
        part_tokens: int = 1 << 30,
    ) -> None:
        self.part_tokens = part_tokens
        self._codec = codec
        self._geometry = geometry
        self._experts = experts
        self._top_k = top_k
        self._clamp = clamp
        self._partials: torch.Tensor | None = None

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        slots: torch.Tensor,
        pool: torch.Tensor,
        live: torch.Tensor,
        prefill: torch.Tensor | None,
        counts: torch.Tensor | None,
        tally: torch.Tensor | None,
        admission: Admission | None = None,
        layer: int = 0,
        lookahead: Lookahead | None = None,
        guess: Guess | None = None,
    ) -> torch.Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H] in x's dtype; experts without a slot contribute zero.

        slots int32 [E]; pool uint8 [S, stride]; live int32 [1]; prefill uint8 [>= T]; counts int32 [E, 2] and tally
        int32 [2], of an admitted layer [3], are added to. admission: number `layer` of its layers first makes its
        experts resident.
        lookahead: spares that rows may have come to already.
        guess: what the next layer is likely to be routed to.
        CodecError if slots and pool are not those of the admission, or for more than `part_tokens` rows of it.
        """
        if admission is not None:
            if tally is not None:
                tally[2] += self._absent(topk_ids[: int(live[0])], slots)
            self._admit(admission, layer, x, topk_ids, slots, pool, live, prefill)
            if lookahead is None:
                copy_rows(admission)
            else:
                copy_rows_ahead(lookahead, admission, layer)
                if guess is not None and len(x) <= MOST_TOKENS:
                    choose(lookahead, admission, layer + 1, guess(x), live)
                    fetch(lookahead, admission)
        self._start(live)
        self.add(x, topk_ids, live, slots=slots, pool=pool)
        alive = topk_ids[: int(live[0])].long()
        valid = (alive >= 0) & (alive < self._experts)
        if counts is not None:
            steady = valid if prefill is None else valid & (prefill[: len(alive), None] == 0)
            counts[:, 0] += torch.bincount(alive[valid], minlength=self._experts)
            counts[:, 1] += torch.bincount(alive[steady], minlength=self._experts)
        if tally is not None:
            tally[0] += self._absent(alive, slots)
            tally[1] += (~valid).sum()
        return self.finish(x, topk_weights, topk_ids, live)

    def _absent(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """How many of the pairs are of experts without a slot."""
        chosen = ids.long()
        return (slots[chosen[(chosen >= 0) & (chosen < self._experts)]] < 0).sum()

    def _admit(
        self,
        admission: Admission,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        slots: torch.Tensor,
        pool: torch.Tensor,
        live: torch.Tensor,
        prefill: torch.Tensor | None,
    ) -> None:
        if x.shape[0] > self.part_tokens:
            raise CodecError(f"{x.shape[0]} rows in an admitted layer: a part has at most {self.part_tokens}")
        if (
            slots.data_ptr() != admission.table[layer].data_ptr()
            or pool.data_ptr() != admission.pool.data_ptr()
        ):
            raise CodecError(f"slots and pool are not those of the admission's layer {layer}")
        admit(admission, layer, topk_ids, live, prefill)

    def settle(self) -> None:
        """Nothing is under way when a call has ended."""

    def begin(self, x: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor) -> None:
        """Start a layer: no contributions yet. CodecError for more than `part_tokens` rows."""
        if x.shape[0] > self.part_tokens:
            raise CodecError(f"{x.shape[0]} rows at once, but a part has at most {self.part_tokens}")
        self._start(live)

    def _start(self, live: torch.Tensor) -> None:
        shape = (int(live[0]), self._top_k, self._geometry.hidden)
        self._partials = torch.zeros(shape, dtype=torch.float32)

    def add(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor,
        *,
        slots: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        """Contributions of every expert with a slot in `slots`."""
        flat = self._begun().view(-1, self._geometry.hidden)
        chosen = topk_ids[: int(live[0])].reshape(-1)
        for expert, slot in enumerate(slots.tolist()):
            pairs = torch.nonzero(chosen == expert).squeeze(1)
            if slot >= 0 and len(pairs):
                weights = self._codec.decode(pool[slot], self._geometry)
                flat[pairs] = expert_ffn(x[pairs // self._top_k], weights, clamp=self._clamp)

    def finish(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result; a new one has to begin after this."""
        partials, self._partials = self._begun(), None
        out = x.new_zeros(x.shape)
        out[: len(partials)] = combine(partials, topk_weights[: len(partials)], x.dtype)
        return out

    def _begun(self) -> torch.Tensor:
        if self._partials is None:
            raise CodecError("a layer was continued that had not begun")
        return self._partials
