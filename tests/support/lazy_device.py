"""A device whose two queues, kernels and copies, run as far apart as their events allow.

`Device(early="copies")` runs every copy as soon as the events that it waits for have happened and kernels not before
somebody needs their results; `early="kernels"` the other way round. What is wrong in the events (a part of a ring
that is written while kernels have yet to read it, kernels that start before their rows arrived) then changes bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ziggurat.allocators.pool import CpuPool, check_write
from ziggurat.kernels.cpu.layer import CpuLayerKernels

Name = Literal["copies", "kernels"]
_OTHER: dict[Name, Name] = {"copies": "kernels", "kernels": "copies"}


class Device:
    """Two ordered queues. A task is something to do, or a place of the other queue to wait for."""

    def __init__(self, early: Name) -> None:
        self._early = early
        self._tasks: dict[Name, list[Callable[[], None] | int]] = {"copies": [], "kernels": []}
        self._done: dict[Name, int] = {"copies": 0, "kernels": 0}

    def put(self, name: Name, task: Callable[[], None]) -> None:
        self._tasks[name].append(task)
        self._run_ahead()

    def place(self, name: Name) -> int:
        """The end of a queue now."""
        return len(self._tasks[name])

    def done(self, name: Name) -> int:
        """How far a queue has come."""
        return self._done[name]

    def hold(self, name: Name, place: int) -> None:
        """What is put into a queue from now on comes after `place` of the other one."""
        self._tasks[name].append(place)
        self._run_ahead()

    def run(self, name: Name, place: int) -> None:
        """Wait on the host for a place of a queue."""
        while self._done[name] < place:
            task = self._tasks[name][self._done[name]]
            if isinstance(task, int) and self._done[_OTHER[name]] < task:
                self.run(_OTHER[name], task)  # which may let this queue run ahead
                continue
            self._do(name)
            if name != self._early:
                self._run_ahead()

    def _do(self, name: Name) -> None:
        task = self._tasks[name][self._done[name]]
        self._done[name] += 1
        if not isinstance(task, int):
            task()

    def _run_ahead(self) -> None:
        """The early queue, up to where it would have to wait."""
        name = self._early
        while self._done[name] < len(self._tasks[name]):
            task = self._tasks[name][self._done[name]]
            if isinstance(task, int) and self._done[_OTHER[name]] < task:
                return
            self._do(name)


class LazyPool(CpuPool):
    """A RowPool on such a device, as `CudaPool` is one on a GPU.

    follows=False: its copies do not wait for kernels that may still read the slots.
    """

    asynchronous = True

    def __init__(self, device: Device, slots: int, stride: int, *, follows: bool = True) -> None:
        super().__init__(slots, stride)
        self._device = device
        self._follows = follows
        self._mark = 0
        self._marks: list[int] = []
        self.tensor.fill_(0xFF)

    def write(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        check_write(slots, rows, count=self.slots, stride=self.stride)
        if self._follows:
            self._device.hold("copies", self._device.place("kernels"))
        for slot, row in zip(slots, rows, strict=True):
            self._device.put("copies", self._copy(slot, row))
        self._mark = self._device.place("copies")
        self._marks.append(self._mark)

    def _copy(self, slot: int, row: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            self.tensor[slot].copy_(row)

        return copy

    def pending(self) -> int:
        done = self._device.done("copies")
        self._marks = [mark for mark in self._marks if mark > done]
        return len(self._marks)

    def ready(self) -> None:
        self._device.hold("kernels", self._mark)

    def drain(self) -> None:
        self._device.run("copies", self._mark)


class LazyKernels(CpuLayerKernels):
    """The CPU's kernels in such a device's queue. The result of a layer is waited for."""

    device: Device

    def begin(self, x: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor) -> None:
        alive = live.clone()
        self.device.put("kernels", lambda: super(LazyKernels, self).begin(x, topk_ids, alive))

    def add(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor,
        *,
        slots: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        alive, table = live.clone(), slots.clone()
        self.device.put(
            "kernels",
            lambda: super(LazyKernels, self).add(x, topk_ids, alive, slots=table, pool=pool),
        )

    def run(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.device.run("kernels", self.device.place("kernels"))
        return super().run(x, *arguments, **options)

    def finish(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        self.device.run("kernels", self.device.place("kernels"))
        return super().finish(x, topk_weights, topk_ids, live)
