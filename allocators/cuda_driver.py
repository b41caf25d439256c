"""The few calls of the CUDA driver that memory and copies need, through ctypes.

ctypes and not the generated bindings for one reason: a batch of copies goes to the driver as three arrays of numbers,
which are at hand, while the bindings take lists of objects and spend more time on 64 of them than the link on 64 small
rows. Foreign calls release the interpreter lock. Signatures: cuda.h of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ziggurat.allocators.errors import CudaError

__all__ = ["CudaDriver", "cuda_driver"]

_LIBRARY = "libcuda.so.1"
_VERSION = 13000  # entry points as of CUDA 13.0; the batched copy had another signature before
_INVALID_VALUE = 1

_POINTER, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_DEVICE_POINTER = ctypes.c_ulonglong

_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICEMAP = 1, 2
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1


class _Location(ctypes.Structure):
    _fields_ = [("type", _INT), ("id", _INT)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the locations are hints for managed memory, which is not used here."""

    _fields_ = [
        ("source_order", _INT),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", _UINT),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), _INT),
    "cuCtxGetCurrent": (ctypes.POINTER(_POINTER),),
    "cuCtxSetCurrent": (_POINTER,),
    "cuMemHostRegister": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemHostGetDevicePointer": (ctypes.POINTER(_DEVICE_POINTER), _POINTER, _UINT),
    "cuMemcpyHtoDAsync": (_DEVICE_POINTER, _POINTER, _SIZE, _POINTER),
    "cuMemcpyBatchAsync": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER),
}


class CudaDriver:
    """One loaded driver. Every call raises CudaError with the driver's own words.

    library: an object that has `cuGetProcAddress_v2`, for tests; None loads the driver of this machine.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL(_LIBRARY)
            except OSError as error:
                raise CudaError(_LIBRARY, None, f"no CUDA driver: {error}") from error
        self._find = library.cuGetProcAddress_v2
        self._calls: dict[str, Any] = {}
        self._contexts: dict[int, ctypes.c_void_p] = {}
        attributes = [_CopyAttributes(source_order=_SOURCE_IN_STREAM_ORDER, flags=flags) for flags in (0, 1)]
        self._attributes = attributes  # by whether to prefer overlap with compute
        self._first_copy = _SIZE(0)
        self._call("cuInit", 0)

    def _entry(self, name: str) -> Any:
        found = self._calls.get(name)
        if found is None:
            address, status = _POINTER(), _INT()
            code = self._find(
                name.encode(), ctypes.byref(address), _INT(_VERSION), ctypes.c_uint64(0), ctypes.byref(status)
            )
            if code or not address.value:
                raise CudaError(
                    name, code or None, "this driver does not have it: CUDA 13 needs driver 580 or newer"
                )
            found = self._calls[name] = ctypes.CFUNCTYPE(_INT, *_SIGNATURES[name])(address.value)
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._entry(name)(*arguments)
        if code:
            raise CudaError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self._entry(name)(code, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode(errors="replace"))
        return ", ".join(words) or "unknown error"

    def use(self, device: int) -> None:
        """Gives the calling thread the primary context of CUDA device `device` unless it has a context."""
        current = _POINTER()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value:
            return
        context = self._contexts.get(device)
        if context is None:
            context = _POINTER()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def _device(self, device: int) -> ctypes.c_int:
        handle = _INT()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        return handle

    def pci_bus_id(self, device: int) -> str:
        """Where CUDA device `device` (as CUDA_VISIBLE_DEVICES numbers them) is, as `0000:1b:00.0`."""
        text = ctypes.create_string_buffer(64)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device(device))
        return text.value.decode().lower()

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory for all contexts and maps it for devices."""
        self._call("cuMemHostRegister", address, nbytes, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICEMAP)

    def unregister(self, address: int) -> None:
        """Undoes `register` of a range that starts at `address`."""
        self._call("cuMemHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        """The address under which devices read registered host memory."""
        found = _DEVICE_POINTER()
        self._call("cuMemHostGetDevicePointer", ctypes.byref(found), address, 0)
        return int(found.value)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Host to device on `stream`. Memory that is not page-locked has been read when this returns."""
        self._call("cuMemcpyHtoDAsync", dst, src, nbytes, stream)

    def copy_batch(
        self, dst: np.ndarray, src: np.ndarray, nbytes: np.ndarray, stream: int, *, overlap: bool = True
    ) -> None:
        """Copies in no particular order on `stream`, which is not the legacy default stream (0).

        dst, src, nbytes: contiguous uint64 `[n]`, n >= 1; the driver has read them when this returns.
        overlap: prefer an engine that leaves multiprocessors to kernels.
        """
        if not stream:
            raise CudaError(
                "cuMemcpyBatchAsync", _INVALID_VALUE, "it takes no default stream; give one of your own"
            )
        self._call(
            "cuMemcpyBatchAsync",
            dst.ctypes.data,
            src.ctypes.data,
            nbytes.ctypes.data,
            len(dst),
            ctypes.addressof(self._attributes[overlap]),
            ctypes.addressof(self._first_copy),
            1,
            stream,
        )


@functools.cache
def cuda_driver() -> CudaDriver:
    """The driver of this machine, loaded once. CudaError if there is none."""
    return CudaDriver()
