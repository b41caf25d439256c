"""The stream on which a pool's rows travel, and the marks by which others wait for them."""

from __future__ import annotations

from typing import Protocol

import torch

from ziggurat.allocators.cuda_driver import CudaDriver, cuda_driver

__all__ = ["CopyLane", "CudaLane", "Mark"]


class Mark(Protocol):
    """A point on a lane."""

    def passed(self) -> bool:
        """Whether everything enqueued before it is done."""

    def hold_current(self) -> None:
        """What is enqueued later on the calling thread's current stream starts after it. Does not block the host."""

    def wait(self) -> None:
        """Blocks the host until it is passed."""


class CopyLane(Protocol):
    """An ordered queue of copies beside the streams that compute."""

    @property
    def handle(self) -> int:
        """The CUstream."""

    def follow_current(self) -> None:
        """What is enqueued here later starts after everything that is on the calling thread's current stream now."""

    def mark(self) -> Mark:
        """The point after everything that is enqueued here now."""


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def passed(self) -> bool:
        return bool(self._event.query())

    def hold_current(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


class CudaLane:
    """A CopyLane on a torch stream of its own."""

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._driver = cuda_driver() if driver is None else driver

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def follow_current(self) -> None:
        # A thread that never used CUDA has no context, and driver calls do not make one.
        self._driver.use(self._device.index)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaMark(event, self._device)
