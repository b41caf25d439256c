"""What is compiled, and for which GPUs.

A unit is one translation unit and becomes one fatbin. Names of kernels are unique over all units. To add a unit: its
source in ``src``, its line in ``UNITS``, then ``python -m ziggurat.kernels.build``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
IMAGES = Path(__file__).resolve().parent / "images"

# `f`: the family target, which has the block-scaled MMA and serves every GPU of its family (12.0 and 12.1).
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120f")

# Shared memory that one block can have, static and dynamic together, in bytes (CUDA C++ programming guide).
SHARED_LIMITS = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_120f": 99 << 10,
}

# Older GPUs lack bfloat16 matrix instructions and asynchronous copies.
OLDEST_CAPABILITY = (8, 0)

# CUDA 13 images need this driver (its CUDA version, and the branch of the driver that users know).
MINIMUM_CUDA = 13000
MINIMUM_DRIVER = "580"


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit: `source` in the source folder, compiled once per target with `defines` set."""

    name: str
    source: str
    defines: tuple[str, ...] = ()  # NAME or NAME=VALUE
    targets: tuple[str, ...] = TARGETS


UNITS = (Unit("gather", "gather.cu"), Unit("moe", "moe.cu"))


def unit(name: str) -> Unit:
    """The unit called `name`; LookupError names the ones there are."""
    for candidate in UNITS:
        if candidate.name == name:
            return candidate
    raise LookupError(f"no unit is called {name!r}: there are {', '.join(u.name for u in UNITS)}")


def target_for(capability: tuple[int, int], targets: tuple[str, ...] = TARGETS) -> str | None:
    """The target whose code runs fastest on a GPU of this compute capability; None if none runs on it.

    Machine code runs on later minor versions of its own major version (CUDA's binary compatibility); a family
    target does the same within its family, which so far is its major version.
    """
    major, minor = capability
    best: tuple[int, str] | None = None
    for target in targets:
        match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", target)
        if match is None:
            raise ValueError(f"{target!r} is not a target such as sm_90 or sm_120f")
        fits = int(match[1]) == major and (
            int(match[2]) == minor if match[3] == "a" else int(match[2]) <= minor
        )
        if fits and (best is None or int(match[2]) > best[0]):
            best = int(match[2]), target
    return best[1] if best else None
