"""Names of GPU kernels, short enough to be read."""

from __future__ import annotations


def short_name(kernel: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    name = kernel.removeprefix("void ").split("(")[0].split("<")[0].strip()
    return name.rsplit("::", 1)[-1] or kernel[:60]
