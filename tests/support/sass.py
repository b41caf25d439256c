"""Machine code of a fatbin, taken apart by cuobjdump (its wheel; needs no GPU)."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)")
_WHEEL = "nvidia-cuda-cuobjdump"


def program() -> Path:
    """Where the wheel put cuobjdump."""
    for file in importlib.metadata.distribution(_WHEEL).files or ():
        if file.name == "cuobjdump":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{_WHEEL} holds no cuobjdump")


def opcodes(image: Path, target: str) -> dict[str, list[str]]:
    """Kernel -> opcodes with their modifiers, in order, of the code for `target` in a fatbin."""
    done = subprocess.run(
        [str(program()), "-sass", "-arch", target, str(image)], capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            name = match[1]
            found[name] = []
        elif name and (match := _INSTRUCTION.match(line)):
            found[name].append(match[1])
    return found


def local_accesses(code: list[str]) -> list[str]:
    """Opcodes that read or write local memory: spilled registers and arrays that are not in registers."""
    return [opcode for opcode in code if opcode.split(".")[0] in ("STL", "LDL")]
