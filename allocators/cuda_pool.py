"""The pool of a CUDA device: torch's memory, filled by asynchronous copies on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ziggurat.allocators.errors import AllocationError, ClosedError, PlaceError
from ziggurat.allocators.lanes import CopyLane, CudaLane, Mark
from ziggurat.allocators.movers import BatchedCopies, RowMover, SingleCopies
from ziggurat.allocators.pages import PAGE, check_geometry
from ziggurat.allocators.pool import check_write

__all__ = ["CudaPool"]


class CudaPool:
    """A DevicePool in memory of torch's allocator, so that whoever asks torch how much is in use sees it.

    `write` returns once the copies are enqueued. They start after what is on the current stream at that moment, since
    kernels there may still read the slots, and run beside what is enqueued later; `ready()` is what orders them.
    Rows in page-locked memory go through `mover` in one batch. Others are read before `write` returns.

    device: `cuda:N`. mover, plain: for page-locked rows (None: `BatchedCopies`) and for others (None: `SingleCopies`).
    lane: the stream of the copies, None for a new one. is_pinned: whether a row's memory is page-locked.
    Raises GeometryError for a shape that cannot be, AllocationError if the device has no memory for it.
    """

    def __init__(
        self,
        slots: int,
        stride: int,
        device: torch.device | str = "cuda:0",
        *,
        mover: RowMover | None = None,
        plain: RowMover | None = None,
        lane: CopyLane | None = None,
        is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned,
    ) -> None:
        check_geometry("device pool", slots, stride)
        self.slots, self.stride = slots, stride
        self.device = torch.device(device)
        self._tensor: torch.Tensor | None = _allocate(slots, stride, self.device)
        self._base = self._tensor.data_ptr()
        self._mover = BatchedCopies() if mover is None else mover
        self._plain = SingleCopies() if plain is None else plain
        self._lane = CudaLane(self.device) if lane is None else lane
        self._is_pinned = is_pinned
        # The rows of copies under way: their memory must not go before it was read.
        self._under_way: deque[tuple[Mark, list[torch.Tensor]]] = deque()

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise ClosedError("device pool is closed")
        return self._tensor

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        if self._tensor is None:
            raise ClosedError("device pool is closed")
        check_write(slots, rows, count=self.slots, stride=self.stride)
        if not slots:
            return
        sources = [row if row.is_contiguous() else row.contiguous() for row in rows]
        locked = self._locked(sources)
        self._lane.follow_current()
        try:
            for mover, wanted in ((self._mover, True), (self._plain, False)):
                chosen = [index for index, one in enumerate(locked) if one is wanted]
                if chosen:
                    mover.move(
                        [self._base + slots[index] * self.stride for index in chosen],
                        [sources[index].data_ptr() for index in chosen],
                        [sources[index].numel() for index in chosen],
                        self._lane.handle,
                    )
        finally:
            self._forget_passed()
            self._under_way.append((self._lane.mark(), sources))

    def _locked(self, rows: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each row is in page-locked memory; asked once for rows of one storage, as all of an arena's are."""
        known: dict[int, bool] = {}
        found = []
        for row in rows:
            storage = row.untyped_storage().data_ptr()
            if storage not in known:
                known[storage] = self._is_pinned(row)
            found.append(known[storage])
        return found

    def _forget_passed(self) -> None:
        while self._under_way and self._under_way[0][0].passed():
            self._under_way.popleft()

    def ready(self) -> None:
        self._forget_passed()
        if self._under_way:
            self._under_way[-1][0].hold_current()

    def pending(self) -> int:
        """How many of the latest writes may still be on their way; no host wait."""
        self._forget_passed()
        return len(self._under_way)

    def drain(self) -> None:
        if self._under_way:
            self._under_way[-1][0].wait()
            self._under_way.clear()

    def row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.slots:
            raise PlaceError(f"slot {slot} is not in a pool of {self.slots}")
        return self.tensor[slot]

    def close(self) -> None:
        # torch may give the memory to somebody else at once, and does not know of copies on this stream.
        self.drain()
        self._tensor = None


def _allocate(slots: int, stride: int, device: torch.device) -> torch.Tensor:
    nbytes = slots * stride
    try:
        # torch promises 512 bytes; slots start on pages as everywhere, so that a row's sections are aligned alike.
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device)[0]
        advice = "lower tiers.device.size"
        raise AllocationError("device pool", f"device {device}", nbytes, free, advice) from error
    first = -memory.data_ptr() % PAGE
    return memory[first : first + nbytes].view(slots, stride)
