"""How often each expert was routed to, with counts that decay by steps, and kept over restarts.

A heat file is a safetensors file with one float64 tensor `heat` [layers, experts]. Its metadata says which model,
codec and geometry it belongs to; a file that says anything else is left alone and not read.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ziggurat.stores.packformat import PackHeader

HEAT_VERSION = 1
HALF_LIFE_STEPS = 1024.0
_FORGOTTEN = 1e-9  # decayed below any influence; counts as never routed to


@dataclass(frozen=True, slots=True)
class HeatKey:
    """What a heat file is about. identity: the checkpoint's content digest."""

    identity: str
    codec: str
    codec_version: str
    layers: int
    experts: int
    hidden: int
    intermediate: int

    @classmethod
    def of(cls, header: PackHeader) -> HeatKey:
        """Of the rows of a pack."""
        h = header
        return cls(h.identity, h.codec, h.codec_version, h.layers, h.experts, h.hidden, h.intermediate)

    def filename_of(self, header: PackHeader) -> str:
        """The file of a pack's rank."""
        return self.filename(header.tp_rank, header.tp_size)

    def filename(self, tp_rank: int, tp_size: int) -> str:
        """One file per rank, so that ranks never write over each other."""
        return f"{self.codec}.{self.identity[:20]}.tp{tp_rank}of{tp_size}.heat.safetensors"


def heat_file(header: PackHeader, folder: Path | None) -> tuple[HeatKey, Path | None]:
    """The heat of a pack's rows, and where it is kept: in `folder`, or nowhere."""
    key = HeatKey.of(header)
    return key, None if folder is None else folder / key.filename_of(header)


class HeatMap:
    """float64 [layers, experts] of decayed routing counts."""

    def __init__(self, layers: int, experts: int, half_life: float = HALF_LIFE_STEPS) -> None:
        self.counts: npt.NDArray[np.float64] = np.zeros((layers, experts), dtype=np.float64)
        self.seeded = False  # whether the counts continue those of a file
        self._decay = 0.5 ** (1.0 / half_life)

    def add(
        self,
        layer: int | npt.NDArray[np.int64],
        experts: npt.NDArray[np.int64],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        """Routed pairs: `experts` [n], `pairs` [n], of one layer or of `layer` [n]; nothing is named twice."""
        self.counts[layer, experts] += pairs

    def advance(self) -> None:
        """One step has passed."""
        self.counts *= self._decay

    def add_steps(self, pairs: npt.NDArray[np.integer], steps: int) -> None:
        """Routed pairs of several steps together, [layers, experts], as if each had had its part of them; that many
        steps have passed then. Which one had them matters by a factor of at most 2 ** (steps / half life)."""
        self.counts *= self._decay**steps
        self.counts += pairs * float((self._decay ** np.arange(1.0, steps + 1.0)).mean())

    def copy(self) -> HeatMap:
        """The same counts, for a thread that must not see them change."""
        other = HeatMap(*self.counts.shape)
        other.counts[:] = self.counts
        other.seeded, other._decay = self.seeded, self._decay
        return other

    def known(self) -> int:
        """How many experts have any heat left."""
        return int((self.counts > _FORGOTTEN).sum())

    def order(self) -> list[tuple[int, float]]:
        """(row key, heat) of every expert with heat, hottest first, equal heat by key."""
        flat = self.counts.reshape(-1)
        ranked = np.argsort(-flat, kind="stable")
        return [(key, float(flat[key])) for key in ranked[: self.known()].tolist()]

    def share(self, chosen: npt.NDArray[np.bool_]) -> float:
        """Part of all heat that lies on the chosen experts, bool [layers, experts]; 0 if there is no heat."""
        total = float(self.counts.sum())
        return float(self.counts[chosen].sum()) / total if total > 0.0 else 0.0

    def top_share(self, rows: int) -> float:
        """Part of all heat that the hottest `rows` experts have: the most that a pool of that size could hold."""
        flat = self.counts.reshape(-1)
        total = float(flat.sum())
        if rows <= 0 or total <= 0.0:
            return 0.0
        first = max(0, flat.size - rows)
        return float(np.partition(flat, first)[first:].sum()) / total


@dataclass(frozen=True, slots=True)
class HeatNote:
    """Whether a heat file was read or written, and why not. problem: something that an operator should look at."""

    done: bool
    reason: str
    problem: bool = False


def load_heat(path: Path, key: HeatKey, heat: HeatMap) -> HeatNote:
    """Fill `heat` from a file. A file that is absent, damaged or about something else is ignored with a reason."""
    found = _read(path, key)
    if isinstance(found, str):
        return HeatNote(False, found, problem=path.exists())
    heat.counts[:] = found
    heat.seeded = True
    return HeatNote(True, f"{heat.known()} experts with heat from {path}")


def save_heat(path: Path, key: HeatKey, heat: HeatMap) -> HeatNote:
    """Replace the file at `path` atomically; its folder is made if it is not there.

    Refused, with a reason, when `heat` does not continue that file and knows fewer experts than it: a fresh boot
    must not throw away what longer runs learned. A failing disk is a reason too, never an error.
    """
    if heat.known() == 0:
        return HeatNote(False, "there is no heat to save")
    if not heat.seeded:
        found = _read(path, key)
        if not isinstance(found, str) and int((found > _FORGOTTEN).sum()) > heat.known():
            return HeatNote(False, f"{path} knows more experts than this run does so far")
    counts = np.where(heat.counts > _FORGOTTEN, heat.counts, 0.0)
    metadata = {"version": str(HEAT_VERSION), "key": json.dumps(asdict(key), sort_keys=True)}
    try:
        _replace(path, save({"heat": counts}, metadata))
    except OSError as error:
        return HeatNote(False, f"{path} cannot be written: {error.strerror or error}", problem=True)
    heat.seeded = True
    return HeatNote(True, f"{heat.known()} experts with heat to {path}")


def _read(path: Path, key: HeatKey) -> npt.NDArray[np.float64] | str:
    """The counts of a file, or the reason why it is of no use."""
    if not path.is_file():
        return f"there is no heat file {path}"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != str(HEAT_VERSION):
                return f"{path} has heat version {metadata.get('version')}, this is version {HEAT_VERSION}"
            if metadata.get("key") != json.dumps(asdict(key), sort_keys=True):
                return f"{path} is about another model, codec or geometry"
            counts = file.get_tensor("heat")
    except (SafetensorError, OSError) as error:
        return f"{path} is damaged: {error}"
    if counts.dtype != np.float64 or counts.shape != (key.layers, key.experts):
        return f"{path} is damaged: heat is {counts.dtype} {counts.shape}"
    if not np.isfinite(counts).all() or (counts < 0.0).any():
        return f"{path} is damaged: it has counts that are negative or not finite"
    checked: npt.NDArray[np.float64] = counts
    return checked


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
