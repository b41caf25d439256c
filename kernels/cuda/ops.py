"""The kernels as torch ops, ``torch.ops.ziggurat_kernels.*``, so that torch.compile traces through their callers.

Each op has a fake implementation (shapes only) and says what it changes. An op names the object that does the work by
a string: a number would be baked into compiled artefacts that another process, with other numbers, loads.

    moe(x [T, H], topk_weights [T, k], topk_ids [T, k], slots [E], pool [S, stride], live [1], prefill [T]?,
        counts [E, 2]?, tally [2]?, kernels) -> [T, H]
    gather_rows(pool [S, stride], slots, sources, nbytes): `nbytes` bytes from address sources[i] to slot slots[i]
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library

from ziggurat.kernels.cuda.gather import GatherKernel
from ziggurat.kernels.cuda.launch import current_stream

NAMESPACE = "ziggurat_kernels"
_MOE = (
    "moe(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor slots, Tensor pool, Tensor live, Tensor? prefill, "
    "Tensor(a!)? counts, Tensor(b!)? tally, str kernels) -> Tensor"
)
_GATHER = "gather_rows(Tensor(a!) pool, int[] slots, int[] sources, int nbytes) -> ()"


class MoeKernels(Protocol):
    """What the op `moe` calls: the arithmetic of one service's layers on one device."""

    def run(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        slots: Tensor,
        pool: Tensor,
        live: Tensor,
        prefill: Tensor | None,
        counts: Tensor | None,
        tally: Tensor | None,
    ) -> Tensor:
        """One layer over the experts that have a slot; a new tensor like `x`."""


_named: WeakValueDictionary[str, MoeKernels] = WeakValueDictionary()
_lock = threading.Lock()
_library: Library | None = None


def register(name: str, kernels: MoeKernels) -> None:
    """Make `kernels` what the op `moe` finds under `name`, as long as the object lives. Replaces an earlier one."""
    define()
    _named[name] = kernels


def define() -> None:
    """Define the ops, once per process."""
    global _library
    with _lock:
        if _library is not None:
            return
        library = Library(NAMESPACE, "FRAGMENT")
        library.define(_MOE)
        library.impl("moe", _moe, "CompositeExplicitAutograd")
        library._register_fake("moe", _moe_fake)
        library.define(_GATHER)
        library.impl("gather_rows", _gather_cuda, "CUDA")
        library.impl("gather_rows", _gather_cpu, "CPU")
        library._register_fake("gather_rows", _gather_fake)
        _library = library


def _moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    slots: Tensor,
    pool: Tensor,
    live: Tensor,
    prefill: Tensor | None,
    counts: Tensor | None,
    tally: Tensor | None,
    kernels: str,
) -> Tensor:
    found = _named.get(kernels)
    if found is None:
        raise LookupError(
            f"no kernels are registered as {kernels!r}: there are {', '.join(sorted(_named)) or 'none'}"
        )
    return found.run(
        x,
        topk_weights,
        topk_ids,
        slots=slots,
        pool=pool,
        live=live,
        prefill=prefill,
        counts=counts,
        tally=tally,
    )


def _moe_fake(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    slots: Tensor,
    pool: Tensor,
    live: Tensor,
    prefill: Tensor | None,
    counts: Tensor | None,
    tally: Tensor | None,
    kernels: str,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def _mover(device: int) -> GatherKernel:
    return GatherKernel(device)


def _places(pool: Tensor, slots: Sequence[int], sources: Sequence[int], nbytes: int) -> list[int]:
    """Addresses of the slots. Raises ValueError for rows that would land outside of them."""
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.stride(1) != 1:
        raise ValueError(
            f"a pool is uint8 [slots, stride] with whole rows, not {pool.dtype} {tuple(pool.shape)}"
        )
    count, stride = pool.shape
    if len(slots) != len(sources):
        raise ValueError(f"{len(slots)} slots and {len(sources)} sources")
    if not 0 <= nbytes <= stride:
        raise ValueError(f"rows of {nbytes} bytes do not fit slots of {stride}")
    for slot in slots:
        if not 0 <= slot < count:
            raise ValueError(f"slot {slot} is not one of the pool's {count}")
    start, step = pool.data_ptr(), pool.stride(0)
    return [start + slot * step for slot in slots]


def _gather_cuda(pool: Tensor, slots: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
    places = _places(pool, slots, sources, nbytes)
    device = pool.get_device()
    _mover(device).move(places, sources, [nbytes] * len(places), current_stream(device))


def _gather_cpu(pool: Tensor, slots: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
    for place, source in zip(_places(pool, slots, sources, nbytes), sources, strict=True):
        ctypes.memmove(place, source, nbytes)


def _gather_fake(pool: Tensor, slots: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
    return None
