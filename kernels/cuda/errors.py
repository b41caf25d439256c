"""What can go wrong between a CUDA source and a running kernel."""

from __future__ import annotations


class CudaError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        call: name of the driver function.
        code: name of the status, such as ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, call: str, code: str, detail: str = "") -> None:
        super().__init__(f"{call} failed: {code}{f' ({detail})' if detail else ''}")
        self.call = call
        self.code = code


class UnsupportedGpuError(RuntimeError):
    """No kernel here can run on this machine: no driver, too old a driver, or a GPU that no image was built for."""


class UnknownKernelError(LookupError):
    """A kernel's name is in no image."""


class LaunchError(ValueError):
    """A launch asks for something that the kernel does not take."""


class BuildError(RuntimeError):
    """A unit does not compile, or the compiler is missing or of another version."""


class ImageError(RuntimeError):
    """The prebuilt images and their manifest do not fit each other, or the sources beside them."""


class LayerError(ValueError):
    """A layer's shapes or dtypes are not what the kernels were set up for, or nothing they can compute."""
