"""Compile one source for one target with NVRTC: no compiler, no headers, no GPU needed.

The output depends on NVRTC's version, the sources and the options, and on nothing else: no path, time or environment
gets into it, so that a rebuild can be compared byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ziggurat.kernels.cuda import wheels
from ziggurat.kernels.cuda.errors import BuildError

# -v makes ptxas say what each kernel uses; the remark is part of the log, and the flag part of the cubin.
OPTIONS = ("--std=c++17", "--no-source-include", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_WHEEL = "nvidia-cuda-nvrtc"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes of a multiprocessor, from the assembler's own report. Bytes, except `registers`."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one source for one target."""

    cubin: bytes
    usage: dict[str, Usage] = field(default_factory=dict)  # by kernel name
    warnings: str = ""


def version() -> str:
    """The full version of the NVRTC wheel, such as 13.0.88. Raises BuildError if it is not installed.

    The library itself tells only its major and minor version.
    """
    return wheels.version(_WHEEL)


def sources_of(source: str, folder: Path) -> dict[str, str]:
    """Name -> text of `source` and of everything in `folder` that it includes, directly or not.

    An include that is not there is left out: it may be for another configuration, and if not, the compiler names it.
    Raises BuildError if `source` itself is not there.
    """
    found: dict[str, str] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop()
        if name in found or (name != source and not (folder / name).is_file()):
            continue
        try:
            found[name] = (folder / name).read_text(encoding="utf-8")
        except OSError as error:
            raise BuildError(f"source {name}: {error.strerror or error} in {folder}") from error
        waiting += _INCLUDE.findall(found[name])
    return found


def compile_source(
    source: str, sources: dict[str, str], target: str, defines: Iterable[str] = ()
) -> Compiled:
    """Compile `sources[source]` for `target`; its includes are taken from `sources` by name.

    Raises BuildError with the compiler's words, or if NVRTC is missing.
    """
    nvrtc = _bindings()
    headers = sorted(name for name in sources if name != source)
    options = [f"--gpu-architecture={target}", *OPTIONS, *(f"--define-macro={define}" for define in defines)]
    program = _call(
        nvrtc.nvrtcCreateProgram,
        sources[source].encode(),
        source.encode(),
        len(headers),
        [sources[name].encode() for name in headers],
        [name.encode() for name in headers],
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        log = log.rstrip("\0 \n")
        if int(status) != 0:
            raise BuildError(f"{source} does not compile for {target}:\n{log}")
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    usage, warnings = read_log(log)
    return Compiled(cubin, usage, warnings)


def read_log(log: str) -> tuple[dict[str, Usage], str]:
    """What ptxas says about each kernel, and the lines that are not such remarks (warnings)."""
    usage: dict[str, Usage] = {}
    other: list[str] = []
    name = ""
    stack = (0, 0, 0)
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name, stack = match[1], (0, 0, 0)
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack = int(match[1]), int(match[2]), int(match[3])
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            usage[name] = Usage(int(match[1]), int(shared[1]) if shared else 0, *stack)
        elif line.strip() and not line.startswith("ptxas info"):
            other.append(line)
    return usage, "\n".join(other)


def _bindings() -> Any:
    wheels.load(_WHEEL, "libnvrtc-builtins.so.13")  # NVRTC opens it by its bare name
    wheels.load(_WHEEL, "libnvrtc.so.13")
    from cuda.bindings import nvrtc

    return nvrtc


def _call(function: Any, *arguments: Any) -> Any:
    status, *results = function(*arguments)
    if int(status) != 0:
        raise BuildError(f"{function.__name__} failed: {status!s}")
    return results[0] if results else None


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    buffer = bytes(_call(size_of, program))
    _call(read, program, buffer)  # writes into the bytes object, as this binding's own examples do
    return buffer
