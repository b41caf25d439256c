"""How fast page-locked memory comes to a device, sampled beside what is measured: a busy host is slower."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import torch

BYTES = 256 << 20
COPIES = 5
"""Large copies of a sample; it takes them 25 ms on a link of 55 GB/s."""
SAMPLES = 4
"""Samples between the steps of a run, at even distances; one more comes last."""


class Link:
    """The link from page-locked host memory to one CUDA device. samples: GB/s, all of them in the order of time."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[float] = []
        self._host = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
        self._target = torch.empty_like(self._host, device=device)
        self._target.copy_(self._host)

    def sample(self) -> float:
        """GB/s of the median of a few large copies, one behind the other, on an otherwise idle device."""
        torch.cuda.synchronize(self._target.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 1)]
        events[0].record()
        for event in events[1:]:
            self._target.copy_(self._host, non_blocking=True)
            event.record()
        events[-1].synchronize()
        took = median(one.elapsed_time(other) for one, other in pairwise(events))
        self.samples.append(round(BYTES / took / 1e6, 2))
        return self.samples[-1]

    @property
    def best(self) -> float | None:
        """GB/s of the best sample so far."""
        return max(self.samples, default=None)


def link_of(device: torch.device) -> Link | None:
    """None where there is no link to measure."""
    return Link(device) if device.type == "cuda" else None


def sampled_before(first: int, last: int) -> frozenset[int]:
    """The steps of first..last (last excluded) that a sample comes before."""
    return frozenset(first + (last - first) * number // SAMPLES for number in range(SAMPLES))
