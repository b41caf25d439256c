"""How kernels see an `Admission`, and the one that copies rows while those in the pool are multiplied."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from ziggurat.kernels.admission import Admission
from ziggurat.kernels.cuda import driver
from ziggurat.kernels.cuda.errors import CudaError, LayerError

#: Blocks and threads of `gather_missing`: 32 KiB in flight for each block. PCIe 5 x16 of an H200 wants 512 KiB.
GATHER_BLOCKS: Final = 24
GATHER_THREADS: Final = 256
_VECTOR: Final = 16  # bytes of one load


class AdmissionParams(ctypes.Structure):
    """`Admission` of `src/params.cuh`, field by field; all zero: the host decides what is resident."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("owners", ctypes.c_void_p),
        ("heat", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("copies", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("log", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("log_mask", ctypes.c_uint32),
        ("slots", ctypes.c_int32),
        ("first_key", ctypes.c_int32),
        ("begins", ctypes.c_int32),
    )


class AdmittedLayers:
    """The kernels' view of each layer of an admission."""

    def __init__(self, admission: Admission, experts: int, arena: int) -> None:
        """`arena`: its address on the device, see `mapped_address`.

        Raises LayerError for an admission that is not of layers of `experts` experts, or that rows cannot be copied in.
        """
        pool, rows = admission.pool, admission.arena
        if admission.experts != experts:
            raise LayerError(f"an admission of {admission.experts} experts a layer, expected {experts}")
        if pool.stride() != rows.stride() or pool.stride(1) != 1 or pool.stride(0) % _VECTOR:
            raise LayerError(
                f"rows of the arena and slots of the pool lie {rows.stride()} and {pool.stride()} bytes apart: that "
                f"has to be the same, and a multiple of {_VECTOR}"
            )
        for name, address in (("arena", arena), ("pool", pool.data_ptr())):
            if address % _VECTOR:
                raise LayerError(f"the {name} begins at {address:#x}, which is no multiple of {_VECTOR}")
        self.admission = admission
        self._table = admission.table.data_ptr()
        self._pool = pool.data_ptr()
        self._step = experts * 4
        self._layers = [self._view(admission, layer, arena) for layer in range(admission.layers)]

    def view(self, layer: int, slots: torch.Tensor, pool: torch.Tensor) -> AdmissionParams:
        """Of layer number `layer`. Raises LayerError if slots and pool are not those of the admission."""
        if slots.data_ptr() != self._table + layer * self._step or pool.data_ptr() != self._pool:
            raise LayerError(f"slots and pool are not those of the admission's layer {layer}")
        return self._layers[layer]

    def of(self, layer: int) -> AdmissionParams:
        """Of layer number `layer`."""
        return self._layers[layer]

    @staticmethod
    def _view(a: Admission, layer: int, arena: int) -> AdmissionParams:
        tensors = (a.table, a.owners, a.heat, a.last, a.places, a.copies, a.state, a.log)
        return AdmissionParams(
            *(tensor.data_ptr() for tensor in tensors),
            arena=arena,
            log_mask=a.log.shape[0] - 1,
            slots=a.slots,
            first_key=layer * a.experts,
            begins=layer == a.first,
        )


def mapped_address(memory: torch.Tensor, device: int) -> int:
    """Where device number `device` finds it: on the device, or on the host in page-locked memory.

    Raises LayerError for host memory that is not mapped for devices.
    """
    if memory.is_cuda:
        return memory.data_ptr()
    with driver.current(device):
        try:
            return int(driver.call(driver.api().cuMemHostGetDevicePointer, memory.data_ptr(), 0))
        except CudaError as error:
            raise LayerError(
                f"the arena is not mapped for devices ({error}): layers are admitted from page-locked memory only"
            ) from error
