"""The host arena of a rank, as a plan describes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from ziggurat.allocators.arena import HostArena
from ziggurat.allocators.cuda_driver import cuda_driver
from ziggurat.allocators.errors import PageLockError
from ziggurat.allocators.lockers import CudaLocker, PageLocker
from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.pinned import PinnedArena, Progress
from ziggurat.allocators.topology import NodeChoice, choose_node, node_of_bus, numa_nodes

__all__ = ["arena_node", "open_arena"]

logger = logging.getLogger(__name__)


def arena_node(
    numa: str | int, device: int, *, sysfs: Path = Path("/sys"), bus: str | None = None
) -> NodeChoice:
    """The node for the arena of CUDA device `device` in this process (which may make a CUDA context).

    numa: `tiers.host.numa`. bus: the device's PCI bus id, None asks the driver. NumaError for a node that is not here,
    CudaError without a driver.
    """
    gpu_node = None
    if numa == "gpu-local":
        gpu_node = node_of_bus(cuda_driver().pci_bus_id(device) if bus is None else bus, sysfs)
    return choose_node(numa, gpu_node, numa_nodes(sysfs))


def open_arena(
    kind: Literal["pageable", "pinned"],
    places: int,
    stride: int,
    *,
    device: int = 0,
    node: int | None = None,
    pageable_instead: bool = False,
    progress: Progress | None = None,
    locker: PageLocker | None = None,
) -> HostArena:
    """An arena of `places` rows of `stride` bytes.

    device, node: of a pinned arena, see `CudaLocker` and `PinnedArena`. pageable_instead: if pages cannot be locked,
    take ordinary memory and say so in the log (`tiers.host.on_limit: pageable`); otherwise PageLockError.
    """
    if kind == "pageable":
        return PageableArena(places, stride)
    try:
        locker = CudaLocker(device) if locker is None else locker
        return PinnedArena(places, stride, node=node, locker=locker, progress=progress)
    except PageLockError as error:
        if not pageable_instead:
            raise
        logger.warning("the arena is pageable, and copies from it are slower: %s", error)
        return PageableArena(places, stride)
