"""The manifest beside the images: what each was made of, and which kernels it holds for which GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ziggurat.kernels.cuda.errors import ImageError, UnknownKernelError
from ziggurat.kernels.cuda.nvrtc import Usage

FILE = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One kernel in one target's code. Bytes, except `registers` (per thread)."""

    parameter: int  # size of the one struct that it takes
    registers: int
    shared: int  # static; a launch may add dynamic
    stack: int
    spill_stores: int
    spill_loads: int

    @classmethod
    def of(cls, usage: Usage, parameter: int) -> KernelRecord:
        return cls(parameter=parameter, **asdict(usage))


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One fatbin."""

    image: str  # file name
    sha256: str
    size: int
    defines: tuple[str, ...]
    sources: dict[str, str]  # file name -> sha256 of its text
    targets: dict[str, dict[str, KernelRecord]]  # target -> kernel name -> what it takes
    cubins: dict[str, int]  # target -> size before compression


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of the images of one build."""

    nvrtc: str
    nvfatbin: str
    options: tuple[str, ...]
    units: dict[str, UnitRecord]

    def find(self, kernel: str) -> tuple[str, UnitRecord]:
        """The unit that holds `kernel` for some target. Raises UnknownKernelError, which names similar ones."""
        names: set[str] = set()
        for unit, record in self.units.items():
            held = {name for kernels in record.targets.values() for name in kernels}
            if kernel in held:
                return unit, record
            names |= held
        raise UnknownKernelError(f"no image holds a kernel {kernel!r}; there are {', '.join(sorted(names))}")

    def text(self) -> str:
        """The file's contents."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def read(folder: Path) -> Manifest:
    """Read the manifest in `folder`. Raises ImageError if it is not there or not one."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
        if found.pop("format") != _FORMAT:
            raise ImageError(f"{path} has another format than this release reads: rebuild the images")
        return Manifest(
            nvrtc=found["nvrtc"],
            nvfatbin=found["nvfatbin"],
            options=tuple(found["options"]),
            units={name: _unit(record) for name, record in found["units"].items()},
        )
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}; rebuild: python -m ziggurat.kernels.build") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"{path} is damaged ({error!r}): python -m ziggurat.kernels.build") from error


def _unit(record: dict[str, Any]) -> UnitRecord:
    targets = {
        target: {name: KernelRecord(**facts) for name, facts in kernels.items()}
        for target, kernels in record["targets"].items()
    }
    return UnitRecord(**{**record, "defines": tuple(record["defines"]), "targets": targets})
