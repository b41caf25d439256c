"""What the runtime needs from its neighbours, as narrow protocols.

The real parts are `ziggurat.stores.pack.Pack`, `ziggurat.allocators` arenas and pools, `ziggurat.kernels.codecs` and
`ziggurat.kernels.cpu.moe`. Nothing here is registered anywhere: whatever has these members fits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import torch

from ziggurat.kernels.admission import Admission
from ziggurat.kernels.codecs.base import DecodedExpert
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.lookahead import Guess, Lookahead
from ziggurat.stores.counts import PackCounts
from ziggurat.stores.pack import RowRequest, RowResult
from ziggurat.stores.packformat import PackHeader


class RowPack(Protocol):
    """A pack file of rows. Safe for concurrent callers."""

    @property
    def header(self) -> PackHeader: ...

    def read_rows(self, wanted: Sequence[RowRequest]) -> Generator[RowResult, None, None]:
        """Read rows into the requests' buffers; yields in order of completion. No read is under way
        when it ends, raises or is closed."""
        ...

    def counts(self) -> PackCounts:
        """What reads met so far."""
        ...

    def close(self) -> None: ...


class RowArena(Protocol):
    """Host memory with room for `places` rows of `stride` bytes."""

    @property
    def places(self) -> int: ...

    @property
    def stride(self) -> int: ...

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [places, stride]."""
        ...

    def view(self, place: int) -> memoryview:
        """Writable bytes of one place."""
        ...

    def close(self) -> None: ...


class RowPool(Protocol):
    """Device memory with room for `slots` rows of `stride` bytes."""

    @property
    def slots(self) -> int: ...

    @property
    def stride(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [slots, stride] on the device; its address never changes."""
        ...

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy host rows (uint8 [stride] each) into slots; complete when it returns if the pool is on the CPU.

        Otherwise the copies run on a stream of their own, behind everything that is queued on torch's current
        stream at the time of the call, since that may still read the slots. The rows must stay as they are until
        `drain`, or until a wait for something that was queued behind `ready`.
        """
        ...

    def ready(self) -> None:
        """Work that is queued on torch's current stream from now on sees everything written so far; no host wait."""
        ...

    def drain(self) -> None:
        """Wait on the host until everything written so far has arrived."""
        ...

    def row(self, slot: int) -> torch.Tensor:
        """uint8 [stride] of one slot, on the device."""
        ...

    def close(self) -> None: ...


class RowCodec(Protocol):
    """Turns a row back into weights."""

    @property
    def name(self) -> str: ...

    def row_bytes(self, g: ExpertGeometry) -> int: ...

    def decode(self, row: torch.Tensor, g: ExpertGeometry) -> DecodedExpert: ...


class ExpertOps(Protocol):
    """The arithmetic of a layer. A result row depends on its input row alone, not on its neighbours in the call."""

    def expert_ffn(
        self, x: torch.Tensor, expert: DecodedExpert, *, clamp: float | None = None
    ) -> torch.Tensor:
        """x [P, H] through one expert -> float32 [P, H]."""
        ...

    def combine(self, partials: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """partials float32 [T, k, H], weights [T, k] -> [T, H], summed in the order j = 0..k-1 in float32."""
        ...


class LayerKernels(Protocol):
    """Arithmetic of MoE layers on one device, asynchronous on its current stream; allocates nothing but results.

    Everywhere: x [T, H] activations; topk_weights [T, k]; topk_ids [T, k] int32 or int64; live int32 [1], how many
    of the T rows count (the rest is padding: zeros in the result, counted nowhere). slots int32 [E]: the slot of
    each expert, -1 for none. pool uint8 [S, stride]. All tensors are on the device.

    The same launches are made whatever the data says, so a call can be captured in a graph; live = 0 is a call
    outside any step. A token's result has the same bits whichever of the two ways it was computed.
    """

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
        """The whole layer -> [T, H] in x's dtype. An expert without a slot contributes zero.

        admission: the layer, number `layer` of its table, first makes its own experts resident, by the rules of
        `ziggurat.kernels.admission`; slots is its `table[layer]` then, pool its `pool`, and T at most part_tokens.

        lookahead: of the admission; rows that were guessed by the layer before may have come to its spares already.
        guess: rows that the next layer is likely to want are fetched beside this one, by the rules of
        `ziggurat.kernels.lookahead`; then layer + 1 has to follow, with the same lookahead. Changes no result.

        prefill: uint8 [at least T], 1 = the token belongs to a prompt. counts: int32 [E, 2], increased by the live
        pairs routed to each expert: of all tokens, of those that are not prefill. tally: int32 [2], increased by the
        live pairs whose expert has no slot, and by those whose id is outside 0..E-1; with an admission int32 [3], the
        last one increased by the live pairs whose expert had no slot when the layer began. All count modulo 2^32.
        """
        ...

    def settle(self) -> None:
        """Wait until no row is fetched any more for a layer that did not come: after a pass that broke off."""
        ...

    @property
    def part_tokens(self) -> int:
        """Rows of x that `begin` takes at most."""
        ...

    def begin(self, x: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor) -> None:
        """Start a layer, or a part of its rows, whose experts come a few at a time."""
        ...

    def add(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor,
        *,
        slots: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        """Compute the experts that have a slot in `slots`. Each expert is in at most one call of a layer."""
        ...

    def finish(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] in x's dtype. An expert that no `add` had contributes zero."""
        ...
