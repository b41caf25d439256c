"""The calls of the CUDA driver that loading and launching needs, with typed errors.

Thin on purpose: cuda.bindings already is the driver's interface. What is added is one way to fail (CudaError names the
call and the driver's own name for the status) and one answer to "can this machine run our images".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ziggurat.kernels.cuda.errors import CudaError, UnsupportedGpuError
from ziggurat.kernels.cuda.units import MINIMUM_CUDA, MINIMUM_DRIVER

_NO_GPU = ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")


def call(function: Any, *arguments: Any) -> Any:
    """Call a function of `cuda.bindings.driver`; returns its result, None, or a tuple of results.

    Raises CudaError.
    """
    status, *results = function(*arguments)
    if status != 0:
        raise CudaError(function.__name__, _name(status), _text(status))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


@lru_cache(maxsize=1)
def api() -> Any:
    """The module `cuda.bindings.driver`, after cuInit and a look at the driver's version.

    Raises UnsupportedGpuError on a machine without a driver or GPU, or with a driver that is too old.
    """
    need = f"the CUDA kernels need an NVIDIA GPU and driver {MINIMUM_DRIVER} or newer"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedGpuError(
            "cuda-bindings is missing: pip install 'cuda-bindings>=13.0,<14'"
        ) from error
    try:
        call(driver.cuInit, 0)
        version = int(call(driver.cuDriverGetVersion))
    except CudaError as error:
        if error.code in _NO_GPU:
            raise UnsupportedGpuError(f"{need}: {error}") from error
        raise
    except RuntimeError as error:  # from the loader: libcuda is not there
        raise UnsupportedGpuError(f"{need}; no driver was found ({error})") from error
    if version < MINIMUM_CUDA:
        raise UnsupportedGpuError(
            f"{need}: this one supports CUDA {version // 1000}.{version % 1000 // 10} and the images are made for "
            f"CUDA {MINIMUM_CUDA // 1000}.{MINIMUM_CUDA % 1000 // 10}; update the driver"
        )
    return driver


def device_count() -> int:
    """How many GPUs the driver shows. Raises UnsupportedGpuError without a driver."""
    return int(call(api().cuDeviceGetCount))


@lru_cache(maxsize=64)
def handle(device: int) -> Any:
    """The driver's handle of device number `device`. Raises UnsupportedGpuError if there is no such device."""
    if not 0 <= device < (count := device_count()):
        raise UnsupportedGpuError(f"there is no GPU number {device}: the driver shows {count}")
    return call(api().cuDeviceGet, device)


@lru_cache(maxsize=64)
def capability(device: int) -> tuple[int, int]:
    """Compute capability of device number `device`, such as (9, 0)."""
    return (
        attribute(device, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
        attribute(device, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    )


def attribute(device: int, name: str) -> int:
    """One device attribute by the driver's name for it."""
    which = getattr(api().CUdevice_attribute, name)
    return int(call(api().cuDeviceGetAttribute, which, handle(device)))


def device_name(device: int) -> str:
    """The GPU's name as the driver tells it."""
    return bytes(call(api().cuDeviceGetName, 256, handle(device))).split(b"\0")[0].decode()


@lru_cache(maxsize=64)
def _primary_context(device: int) -> Any:
    # Kept for the life of the process: it is the context that torch uses as well.
    return call(api().cuDevicePrimaryCtxRetain, handle(device))


@contextmanager
def current(device: int) -> Iterator[None]:
    """Make the primary context of `device` the calling thread's current one for the block."""
    call(api().cuCtxPushCurrent, _primary_context(device))
    try:
        yield
    finally:
        call(api().cuCtxPopCurrent)


def _name(status: Any) -> str:
    from cuda.bindings import driver

    try:
        _, name = driver.cuGetErrorName(status)
        if name:
            return str(name.decode())
    except RuntimeError:
        pass
    return str(getattr(status, "name", status))


def _text(status: Any) -> str:
    from cuda.bindings import driver

    try:
        _, text = driver.cuGetErrorString(status)
    except RuntimeError:
        return ""
    return text.decode() if text else ""
