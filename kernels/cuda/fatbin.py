"""Bundle machine code for several targets into one file that the driver takes (NVIDIA's nvFatbin library)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from ziggurat.kernels.cuda import wheels
from ziggurat.kernels.cuda.errors import BuildError

_WHEEL = "nvidia-nvfatbin"
_OPTIONS = (b"-64", b"-compress-all", b"-compress-mode=size")


def version() -> str:
    """The version of the nvFatbin wheel. Raises BuildError if it is not installed."""
    return wheels.version(_WHEEL)


def bundle(name: str, cubins: Mapping[str, bytes]) -> bytes:
    """One compressed fatbin of the cubins, keyed by target. The same input gives the same bytes.

    Raises BuildError if the library is missing or refuses a cubin.
    """
    library = _library()
    handle = ctypes.c_void_p()
    options = (ctypes.c_char_p * len(_OPTIONS))(*_OPTIONS)
    _check(library, "nvFatbinCreate", ctypes.byref(handle), options, ctypes.c_size_t(len(_OPTIONS)))
    try:
        for target, cubin in cubins.items():
            _check(
                library,
                "nvFatbinAddCubin",
                handle,
                cubin,
                ctypes.c_size_t(len(cubin)),
                target.removeprefix("sm_").encode(),
                f"{name}.{target}.cubin".encode(),
            )
        size = ctypes.c_size_t()
        _check(library, "nvFatbinSize", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        _check(library, "nvFatbinGet", handle, buffer)
        return buffer.raw
    finally:
        library.nvFatbinDestroy(ctypes.byref(handle))


def _library() -> ctypes.CDLL:
    library = wheels.load(_WHEEL, "libnvfatbin.so.13")
    library.nvFatbinGetErrorString.restype = ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, call: str, *arguments: object) -> None:
    status = getattr(library, call)(*arguments)
    if status != 0:
        text = library.nvFatbinGetErrorString(status) or b""
        raise BuildError(f"{call} failed: {text.decode() or status}")
