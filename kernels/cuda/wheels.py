"""Libraries of NVIDIA's wheels: which version is installed, and loading the one that was asked about."""

from __future__ import annotations

import ctypes
import importlib.metadata

from ziggurat.kernels.cuda.errors import BuildError


def version(wheel: str) -> str:
    """The installed version of `wheel`, such as 13.0.88. Raises BuildError if it is not installed."""
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"{wheel} is not installed: pip install {wheel}") from None


def load(wheel: str, soname: str) -> ctypes.CDLL:
    """Load the library whose name starts with `soname` from `wheel`, wherever that is installed. Raises BuildError.

    By its full path: others look for it by name, in the interpreter's own site-packages only, take it if it is
    loaded already, and would otherwise go on to whatever toolkit the machine has.
    """
    version(wheel)
    for file in importlib.metadata.distribution(wheel).files or ():
        if file.name.startswith(soname):
            try:
                return ctypes.CDLL(str(file.locate()))
            except OSError as error:
                raise BuildError(f"{wheel} {version(wheel)} does not load: {error}") from error
    raise BuildError(f"{wheel} {version(wheel)} holds no {soname}: another major version is needed")
