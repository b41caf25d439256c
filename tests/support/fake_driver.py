"""Run a program against the imaginary GPU of fake_driver.c."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lanes.cuda_stubs import find_compiler

SOURCE = Path(__file__).with_name("fake_driver.c")

# What a program sees of the last launch; `record()` as a dictionary.
PRELUDE = """
import ctypes, json
class Record(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint) for n in ("launches", "loads")]
    _fields_ += [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3)]
    _fields_ += [(n, ctypes.c_uint) for n in ("shared", "attributes")]
    _fields_ += [(n, ctypes.c_int) for n in ("attribute", "allowed")]
    _fields_ += [(n, ctypes.c_uint64) for n in ("stream", "function")]
    _fields_ += [("parameter", ctypes.c_ubyte * 8192)]
    _fields_ += [(n, ctypes.c_uint) for n in ("allowed_shared", "function_loads", "contexts_left")]
def record():
    r = Record.in_dll(ctypes.CDLL("libcuda.so.1"), "fake_record")
    return {n: getattr(r, n) if isinstance(getattr(r, n), int) else list(getattr(r, n)) for n, _ in Record._fields_}
def refused(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
def show(**facts):
    print(json.dumps(facts))
"""


def build(folder: Path) -> Path:
    """Compile the driver; returns the folder that holds it."""
    compiler = find_compiler()
    assert compiler is not None, "the suites need a C compiler, as the set-up does"
    command = [*compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(SOURCE), "-ldl"], check=True)
    return folder


def run(folder: Path, program: str, **environment: object) -> dict[str, Any]:
    """Run `program` after PRELUDE; returns what it gave `show`. Keyword arguments are the driver's settings."""
    settings = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown
