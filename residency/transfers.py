"""Small host values on their way to a device and back, in stream order, without making the host wait.

A copy out of (or into) pinned memory runs later than the call that asks for it. So a buffer is not written to again
before the event that follows its last copy has happened, and not read before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Event(Protocol):
    """A place in the order of a device's work, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Stand behind everything that is queued on the current stream now."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it (a new event: yes)."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the device has passed it."""
        ...


EventFactory = Callable[[], Event]


class _Passed:
    """The event of a device that has done its work when a call returns."""

    def record(self) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _CudaEvent:
    """An event on the current stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


def events_of(device: torch.device) -> EventFactory:
    """What makes events for a device."""
    return _Passed if device.type == "cpu" else lambda: _CudaEvent(device)


def _host_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer that the device copies from and to without blocking."""
    # A normal tensor also if the model runs in inference mode: it is written to outside of that, too.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


class Uploads:
    """Host arrays into device tensors, through `depth` pinned buffers of `shape` in turn."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        depth: int = 4,
        events: EventFactory | None = None,
    ) -> None:
        events = events or events_of(device)
        self._buffers = [_host_like(shape, dtype, device) for _ in range(depth)]
        self._events = [events() for _ in range(depth)]
        self._next = 0

    def send(self, values: npt.NDArray[np.generic], target: torch.Tensor) -> None:
        """Queue the copy of `values` to the first rows of `target`. `values` may change when this returns.

        Waits only if all buffers are on their way.
        """
        buffer, event = self._buffers[self._next], self._events[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        event.synchronize()
        part = buffer[: len(values)]
        part.numpy()[...] = values
        target[: len(values)].copy_(part, non_blocking=True)
        event.record()


class Download:
    """A copy of one device tensor on the host, taken at one place of the device's work."""

    def __init__(self, source: torch.Tensor, *, events: EventFactory | None = None) -> None:
        self._source = source
        self._host = _host_like(tuple(source.shape), source.dtype, source.device)
        self._event = (events or events_of(source.device))()

    def take(self) -> None:
        """Queue the copy. What an earlier one brought must have been read."""
        self._host.copy_(self._source, non_blocking=True)
        self._event.record()

    def arrived(self) -> bool:
        """Whether the copy is complete; never waits."""
        return self._event.query()

    def read(self) -> npt.NDArray[np.int32]:
        """The values, after waiting for them; valid until the next `take`."""
        self._event.synchronize()
        values: npt.NDArray[np.int32] = self._host.numpy()
        return values
