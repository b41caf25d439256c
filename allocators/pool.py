"""What a device pool is: slots for rows where layers compute; and the pool of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ziggurat.allocators.errors import PlaceError, RowError
from ziggurat.allocators.pages import PageRows

__all__ = ["CpuPool", "DevicePool", "check_write"]


class DevicePool(Protocol):
    """A fixed number of equal slots on one device. Which row is in which slot is the caller's business.

    What a slot holds before its first write, and after the bytes of a shorter row, is not defined.
    """

    @property
    def slots(self) -> int:
        """Number of slots, at least 1."""

    @property
    def stride(self) -> int:
        """Bytes of a slot, a multiple of 4096."""

    @property
    def device(self) -> torch.device: ...

    @property
    def tensor(self) -> torch.Tensor:
        """All slots: u8 `[slots, stride]` on `device`; its address never changes. ClosedError once closed."""

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copies host row `rows[i]` (u8 `[n]`, 1 <= n <= stride) to slot `slots[i]`, for every i.

        The copies come after everything that is on the device's current stream now. They may still be under way when
        this returns: call `ready()` before work that reads the slots, `drain()` before the host changes the rows. The
        rows' memory is kept alive until then. Raises PlaceError for a slot that does not exist or is named twice,
        RowError for a row that does not fit; nothing is written then.
        """

    def ready(self) -> None:
        """Work that is put on the device's current stream from now on sees all rows. Does not block the host."""

    def drain(self) -> None:
        """Blocks the host until every row is in its slot: then the rows' memory may change or go."""

    def row(self, slot: int) -> torch.Tensor:
        """Slot `slot`: u8 `[stride]`, a view of `tensor`. PlaceError if there is no such slot."""

    def close(self) -> None:
        """Gives the memory back once no view of it is left. Closing twice does nothing."""


def check_write(slots: Sequence[int], rows: Sequence[torch.Tensor], *, count: int, stride: int) -> None:
    """The checks that every `DevicePool.write` makes before it copies a byte, for a pool of `count` slots."""
    if len(slots) != len(rows):
        raise RowError(f"{len(rows)} rows for {len(slots)} slots")
    taken: set[int] = set()
    for slot, row in zip(slots, rows, strict=True):
        if not 0 <= slot < count:
            raise PlaceError(f"slot {slot} is not in a pool of {count}")
        if slot in taken:
            raise PlaceError(f"slot {slot} is written twice in one call")
        taken.add(slot)
        if row.dtype != torch.uint8 or row.dim() != 1 or row.device.type != "cpu":
            raise RowError(
                f"a row is a one-dimensional host tensor of u8, not {row.dtype}{list(row.shape)} on {row.device}"
            )
        if not 0 < row.numel() <= stride:
            raise RowError(f"a row of {row.numel()} bytes does not go into a slot of {stride}")


class CpuPool:
    """A DevicePool in host memory. Slots start on 4 KiB boundaries, so that a direct read can fill one.

    Raises GeometryError for a shape that cannot be, AllocationError if the kernel refuses the memory.
    """

    device = torch.device("cpu")

    def __init__(self, slots: int, stride: int) -> None:
        self._rows = PageRows("device pool", slots, stride)

    @property
    def slots(self) -> int:
        return self._rows.rows

    @property
    def stride(self) -> int:
        return self._rows.stride

    @property
    def tensor(self) -> torch.Tensor:
        return self._rows.tensor

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        tensor = self.tensor
        check_write(slots, rows, count=self.slots, stride=self.stride)
        for slot, row in zip(slots, rows, strict=True):
            tensor[slot, : row.numel()].copy_(row)

    def ready(self) -> None:
        """Nothing to do: `write` returns when the rows are there."""

    def drain(self) -> None:
        """Nothing to do, as for `ready`."""

    def row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.slots:
            raise PlaceError(f"slot {slot} is not in a pool of {self.slots}")
        return self.tensor[slot]

    def close(self) -> None:
        self._rows.close()
