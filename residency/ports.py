"""What the runtime needs from its neighbours, as narrow protocols.

The real parts are `ziggurat.stores.pack.Pack`, `ziggurat.allocators` arenas and pools, `ziggurat.kernels.codecs` and
`ziggurat.kernels.cpu.moe`. Nothing here is registered anywhere: whatever has these members fits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import torch

from ziggurat.kernels.codecs.base import DecodedExpert
from ziggurat.kernels.geometry import ExpertGeometry
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

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy host rows (uint8 [stride] each) into slots; complete when it returns if the pool is on the CPU."""
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
