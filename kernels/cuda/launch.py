"""One kernel on one device, ready to be launched with as little Python as possible.

A launch on the decode path happens thousands of times per second in eager code, so everything that does not change
from call to call is kept: the driver's launch configuration (grid, block, shared memory, stream, attributes) is an
object that is made once per combination, and the parameters are a ctypes struct that the caller may keep and refill.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ziggurat.kernels.cuda import driver
from ziggurat.kernels.cuda.errors import CudaError, LaunchError

# Shared memory, static and dynamic together, that a block has without asking for more.
_SHARED_FREE = 48 * 1024
# Configurations kept per kernel; decode shapes are few, prefill grids are many.
_CACHE = 1024
_POINTER = ctypes.c_void_p * 1
Grid = int | tuple[int, int, int]


def current_stream(device: int) -> int:
    """Address of torch's current CUDA stream on `device` (0: the default stream)."""
    import torch

    return int(torch._C._cuda_getCurrentRawStream(device))


class Kernel:
    """A loaded kernel of one device.

    Attributes:
        name: its name in the source.
        device: number of the device.
        parameter_bytes: size of the one struct that it takes.
    """

    def __init__(self, name: str, device: int, kernel: Any, function: Any) -> None:
        """Wrap the driver's handles: `kernel` (CUkernel) and `function` (its CUfunction in the primary context)."""
        api = driver.api()
        self.name = name
        self.device = device
        self._kernel = kernel
        self._function = function
        self._dependent = driver.capability(device) >= (9, 0)
        self._static = int(
            driver.call(
                api.cuFuncGetAttribute, api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function
            )
        )
        self._shared = _SHARED_FREE - self._static
        self._configurations: dict[tuple[Grid, Grid, int, int, bool], Any] = {}
        self._launch: Callable[..., Any] = api.cuLaunchKernelEx
        # That there is no second one is not asked: the driver would report an error, which memory checkers count.
        _, self.parameter_bytes = driver.call(api.cuKernelGetParamInfo, kernel, 0)
        self._fits: set[type[ctypes.Structure]] = set()

    def launch(
        self,
        grid: Grid,
        block: Grid,
        params: ctypes.Structure,
        *,
        shared: int = 0,
        stream: int | None = None,
        dependent: bool = False,
    ) -> None:
        """Enqueue the kernel; returns without waiting.

        Args:
            grid: blocks, one number or (x, y, z).
            block: threads per block, the same way.
            params: the kernel's struct; copied by the call, so it can be refilled at once.
            shared: dynamic shared memory in bytes; more than 48 KiB in all is arranged for at its first use.
            stream: address of a CUDA stream; None: torch's current one on this device.
            dependent: let it start before the kernel in front of it has finished (programmatic stream
                serialization); it then has to wait itself (`griddepcontrol.wait`). Without effect below 9.0.

        Raises LaunchError for a struct of another size, CudaError if the driver refuses the launch.
        """
        if type(params) not in self._fits:
            self._check(type(params))
        if stream is None:
            stream = current_stream(self.device)
        key = (grid, block, shared, stream, dependent)
        configuration = self._configurations.get(key)
        if configuration is None:
            configuration = self._configure(key)
        kept = params.__dict__.get("_launch")
        if kept is None:
            # The driver wants an array of pointers to parameters. It lives as long as the struct that it points to.
            pointer = _POINTER(ctypes.addressof(params))
            kept = params.__dict__["_launch"] = (ctypes.addressof(pointer), pointer)
        (status,) = self._launch(configuration, self._function, kept[0], 0)
        if status != 0:
            raise CudaError(
                "cuLaunchKernelEx",
                status.name,
                f"kernel {self.name}, grid {grid}, block {block}, {shared} bytes of shared memory",
            )

    def reserve_shared(self, size: int) -> None:
        """Allow launches with `size` bytes of dynamic shared memory. Raises CudaError if the GPU has less."""
        if size <= self._shared:
            return
        api = driver.api()
        which = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        try:
            driver.call(api.cuKernelSetAttribute, which, size, self._kernel, driver.handle(self.device))
        except CudaError as error:
            limit = driver.attribute(self.device, "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
            raise CudaError(
                error.call,
                error.code,
                f"kernel {self.name} asks for {size} bytes of shared memory beside its own {self._static}; "
                f"a block of this GPU has {limit}",
            ) from error
        self._shared = size

    def blocks_per_multiprocessor(self, block: int, shared: int = 0) -> int:
        """How many blocks of `block` threads fit one multiprocessor at a time."""
        self.reserve_shared(shared)
        with driver.current(self.device):
            return int(
                driver.call(
                    driver.api().cuOccupancyMaxActiveBlocksPerMultiprocessor, self._function, block, shared
                )
            )

    def resources(self) -> dict[str, int]:
        """What the driver says about the loaded code: registers per thread, local, static shared bytes, threads."""
        api = driver.api()
        names = {
            "registers": "CU_FUNC_ATTRIBUTE_NUM_REGS",
            "local": "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES",
            "shared": "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES",
            "threads": "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
        }
        return {
            key: int(
                driver.call(api.cuFuncGetAttribute, getattr(api.CUfunction_attribute, name), self._function)
            )
            for key, name in names.items()
        }

    def _check(self, kind: type[ctypes.Structure]) -> None:
        if ctypes.sizeof(kind) != self.parameter_bytes:
            raise LaunchError(
                f"kernel {self.name} takes a struct of {self.parameter_bytes} bytes and {kind.__name__} has "
                f"{ctypes.sizeof(kind)}: one of the two definitions is out of date"
            )
        self._fits.add(kind)

    def _configure(self, key: tuple[Grid, Grid, int, int, bool]) -> Any:
        grid, block, shared, stream, dependent = key
        self.reserve_shared(shared)
        api = driver.api()
        made = api.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = (grid, 1, 1) if isinstance(grid, int) else grid
        made.blockDimX, made.blockDimY, made.blockDimZ = (block, 1, 1) if isinstance(block, int) else block
        made.sharedMemBytes = shared
        made.hStream = api.CUstream(stream)
        if dependent and self._dependent:
            overlap = api.CUlaunchAttribute()
            overlap.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            made.attrs = [overlap]
            made.numAttrs = 1
        else:
            made.numAttrs = 0
        if len(self._configurations) >= _CACHE:
            self._configurations.clear()
        self._configurations[key] = made
        return made
