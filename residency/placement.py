"""The parts of a service that depend on where its layers compute: pool, arena, kernels."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.kernels.codecs.base import Codec
from ziggurat.kernels.cpu.layer import CpuLayerKernels
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.inline.choice import MappedArena
from ziggurat.residency.ledger import arena_key, arena_label
from ziggurat.residency.ports import LayerKernels, RowArena, RowPool
from ziggurat.residency.runtime_errors import UnsupportedDeviceError
from ziggurat.residency.sizes import format_bytes
from ziggurat.residency.streaming.ring import StagingRing
from ziggurat.residency.streaming.sizing import RingShape
from ziggurat.stores.packformat import PackHeader

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_SAY_EVERY = 5.0  # seconds between two lines about an arena in the making


@dataclass(frozen=True, slots=True)
class Placement:
    """Where layers compute, and on what.

    device: "cpu" or "cuda:N" of this process. dtype: of the activations. max_tokens: rows of the largest batch.
    kernels: run layers behind kernels and static tensors, as always on a GPU; on the CPU that is for tests.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    max_tokens: int = 0
    kernels: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def check(self, codec: str) -> None:
        """UnsupportedDeviceError for a device that is not here, and for activations that its kernels do not take."""
        if self.device.type == "cpu":
            return
        if not self.on_gpu:
            raise UnsupportedDeviceError(
                f"layers compute on the CPU or on a CUDA device, not on {self.device}"
            )
        if self.device.index is None or self.device.index >= torch.cuda.device_count():
            raise UnsupportedDeviceError(
                f"tiers.device.device: torch sees {torch.cuda.device_count()} CUDA devices and no {self.device}; set "
                "it to auto or cpu, or see `ziggurat doctor`"
            )
        self.check_dtype(codec)

    def check_dtype(self, codec: str) -> None:
        """UnsupportedDeviceError for activations that the kernels of a GPU do not take."""
        if self.dtype not in _DTYPES:
            raise UnsupportedDeviceError(
                f"layers on a GPU take bfloat16 or float16 activations, not {_name(self.dtype)}; start with --dtype "
                "bfloat16"
            )
        if codec == "bf16" and self.dtype is not torch.bfloat16:
            raise UnsupportedDeviceError(
                f"codecs.base: bf16 rows need bfloat16 activations on a GPU, not {_name(self.dtype)}; start with "
                "--dtype bfloat16 or set it to w2 or fp4"
            )


def open_pool(place: Placement, slots: int, stride: int) -> RowPool:
    """The pool of a placement. The allocators' errors if the memory is not to be had."""
    if not place.on_gpu:
        from ziggurat.allocators.pool import CpuPool

        return CpuPool(slots, stride)
    from ziggurat.allocators.cuda_pool import CudaPool
    from ziggurat.allocators.movers import GATHER_BELOW, BatchedCopies, FewOrMany, RowMover, SingleCopies
    from ziggurat.kernels.cuda.gather import GatherKernel

    copies = FewOrMany(SingleCopies(), BatchedCopies())
    mover: RowMover = copies if stride >= GATHER_BELOW else GatherKernel(place.device.index)
    return CudaPool(slots, stride, place.device, mover=mover)


def open_ring(place: Placement, shape: RingShape, stride: int) -> StagingRing:
    """Staging memory beside the pool. Its copies share a lane of their own, and go by the copy engine whatever the size
    of rows: a kernel that gathers them would wait for the multiprocessors on which the layers compute."""
    if not place.on_gpu:
        from ziggurat.allocators.pool import CpuPool

        return StagingRing([CpuPool(shape.rows, stride) for _ in range(shape.parts)])
    from ziggurat.allocators.cuda_pool import CudaPool
    from ziggurat.allocators.lanes import CudaLane
    from ziggurat.allocators.movers import BatchedCopies

    lane, mover = CudaLane(place.device), BatchedCopies(overlap=True)
    return StagingRing(
        [CudaPool(shape.rows, stride, place.device, mover=mover, lane=lane) for _ in range(shape.parts)]
    )


def open_arena(
    place: Placement, places: int, stride: int, *, kind: str, numa: str | int, on_limit: str
) -> RowArena:
    """Host memory for rows on their way to the pool: page-locked for a GPU, unless the plan says pageable.

    kind: "pinned" or "pageable". numa, on_limit: as in the configuration.
    """
    from ziggurat.allocators import opening

    if kind != "pinned" or not place.on_gpu:
        return opening.open_arena("pageable", places, stride)
    choice = opening.arena_node(numa, place.device.index)
    if choice.note is not None:
        logger.info("%s", choice.note)
    return opening.open_arena(
        "pinned",
        places,
        stride,
        device=place.device.index,
        node=choice.node,
        pageable_instead=on_limit == "pageable",
        progress=_progress(),
    )


def open_shared_arena(
    place: Placement,
    socket: Path,
    header: PackHeader,
    places: int,
    private: int,
    *,
    kind: str,
    numa: str | int,
    on_limit: str,
) -> RowArena:
    """The same in the memory of the arena process at `socket`, behind `private` places for reads that are not kept.

    SharedArenaError if that cannot be had: then an arena of one's own can.
    """
    from ziggurat.allocators import opening
    from ziggurat.allocators.errors import PageLockError
    from ziggurat.allocators.lockers import CudaLocker
    from ziggurat.allocators.shared.arena import attach_arena
    from ziggurat.allocators.shared.messages import Attach

    pinned = kind == "pinned" and place.on_gpu
    node = opening.arena_node(numa, place.device.index).node if pinned else None
    key, label = arena_key(header), arena_label(header)
    # Drivers lock pages for writing unless asked otherwise, and not all of them can be asked.
    want = Attach(key, label, places, header.stride, node, writable=pinned)
    if pinned:
        try:
            locker = CudaLocker(place.device.index)
            return attach_arena(socket, want, private, locker=locker, progress=_progress())
        except PageLockError as error:
            if on_limit != "pageable":
                raise
            logger.warning("the arena is pageable, and copies from it are slower: %s", error)
    return attach_arena(socket, want, private, progress=_progress())


def map_arena(place: Placement, arena: RowArena | None) -> MappedArena:
    """The arena as kernels of the placement see it."""
    if arena is None:
        return MappedArena(None, "there is no arena; set tiers.host.size")
    if not place.on_gpu:
        return MappedArena(arena.tensor)
    pointer: int | None = getattr(arena, "device_pointer", None)
    if pointer is None:
        return MappedArena(None, "the arena is not page-locked memory, which a GPU cannot read by itself")
    if pointer == arena.tensor.data_ptr():
        return MappedArena(arena.tensor)
    # An address that only devices use: nothing is read through this tensor.
    there = (ctypes.c_uint8 * (arena.places * arena.stride)).from_address(pointer)
    return MappedArena(torch.frombuffer(there, dtype=torch.uint8).view(arena.places, arena.stride))


def open_kernels(place: Placement, geometry: ServiceGeometry, codec: Codec) -> LayerKernels | None:
    """What runs layers, or None where the host computes them."""
    sizes = ExpertGeometry(geometry.hidden, geometry.intermediate)
    if place.on_gpu:
        from ziggurat.kernels.cuda.layer import CudaLayerKernels

        return CudaLayerKernels(
            codec.name,
            sizes,
            geometry.experts,
            geometry.top_k,
            clamp=geometry.clamp,
            dtype=place.dtype,
            device=place.device,
            max_tokens=place.max_tokens,
        )
    if place.kernels:
        return CpuLayerKernels(codec, sizes, geometry.experts, geometry.top_k, clamp=geometry.clamp)
    return None


def _progress() -> Callable[[int, int], None]:
    """Says now and then how much of an arena is ready, if that takes long."""
    said = time.monotonic()

    def say(ready: int, whole: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SAY_EVERY:
            said = now
            logger.info("arena: %s of %s ready", format_bytes(ready), format_bytes(whole))

    return say


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
