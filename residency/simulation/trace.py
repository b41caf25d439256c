"""Routing traces: where a model sent its tokens, and how a file of them looks.

A trace file is an uncompressed or compressed .npz (a zip of .npy members) with

    topk_ids   integers [sequence, position, layer, k]: experts of each token, in the order of the model's choices
    lengths    integers [sequence]: positions that count; the rest of a sequence is padding (optional: all count)
    prompts    integers [sequence]: how many of them belong to the prompt (optional: none)
    batches    integers [step + 1]: if the sequence dimension is 1 and positions are the tokens of a run in the order in
               which they were computed, step i is tokens batches[i]..batches[i + 1] (optional)
    prefill    bool [position]: with `batches`, which tokens belonged to a prompt (optional: none)
    metadata   a JSON object as UTF-8 bytes, uint8 [n]: num_experts, model, layers (the model's own layer numbers),
               source, licence, order; unknown keys are kept (optional)

Nothing in a file is ever unpickled, and no member is read before its size was found to be plausible.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ziggurat.residency.passes import BoolArray, IntArray
from ziggurat.residency.simulation.errors import TraceError

IdArray = npt.NDArray[np.int32]

MOST_BYTES: Final = 2 << 30  # of one member, unpacked
MOST_EXPERTS: Final = 1 << 20
_METADATA_BYTES: Final = 1 << 20
# Whatever zipfile, zlib and numpy raise for bytes that are no archive of arrays.
_UNREADABLE: Final = (
    OSError,
    ValueError,
    TypeError,
    EOFError,
    KeyError,
    RuntimeError,
    MemoryError,
    OverflowError,
    SyntaxError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class Trace:
    """ids: int32 [S, P, L, k]. lengths, prompts: int64 [S]. experts: per layer. name: for people.

    batches: int64 [steps + 1] or None; prefill: bool [P] or None, see the format. metadata: what the file says beside.
    TraceError if they contradict each other.
    """

    ids: IdArray
    experts: int
    lengths: IntArray
    prompts: IntArray
    batches: IntArray | None = None
    prefill: BoolArray | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    name: str = "trace"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def sequences(self) -> int:
        return int(self.ids.shape[0])

    @property
    def positions(self) -> int:
        return int(self.ids.shape[1])

    @property
    def layers(self) -> int:
        return int(self.ids.shape[2])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[3])

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return int(self.lengths.sum())

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The model's own numbers of the layers."""
        said = self.metadata.get("layers")
        if isinstance(said, list) and len(said) == self.layers:
            return tuple(int(one) for one in said)
        return tuple(range(self.layers))

    def part(self, first: int, last: int, name: str) -> Trace:
        """Sequences first..last (last excluded)."""
        here = slice(first, last)
        return Trace(
            self.ids[here],
            self.experts,
            self.lengths[here],
            self.prompts[here],
            self.batches,
            self.prefill,
            self.metadata,
            name,
        )


def make_trace(
    ids: npt.ArrayLike,
    *,
    experts: int | None = None,
    lengths: npt.ArrayLike | None = None,
    prompts: npt.ArrayLike | None = None,
    batches: npt.ArrayLike | None = None,
    prefill: npt.ArrayLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    name: str = "trace",
) -> Trace:
    """A trace with what is not given filled in; experts: one more than the largest id. TraceError as `Trace`."""
    array = _integers(np.asarray(ids), "topk_ids")
    if array.ndim != 4 or 0 in array.shape:
        raise TraceError(
            f"{name}: topk_ids is {list(array.shape)}; a trace is [sequence, position, layer, k] and not empty"
        )
    sequences, positions = array.shape[:2]
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= MOST_EXPERTS:
        raise TraceError(f"{name}: topk_ids holds {low if low < 0 else high}, which is no expert")
    return Trace(
        np.ascontiguousarray(array, dtype=np.int32),
        high + 1 if experts is None else experts,
        _column(lengths, sequences, positions, "lengths"),
        _column(prompts, sequences, 0, "prompts"),
        None if batches is None else _integers(np.asarray(batches), "batches").astype(np.int64),
        None if prefill is None else np.asarray(prefill, dtype=np.bool_),
        dict(metadata or {}),
        name,
    )


def read_members(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an .npz, by name. TraceError for anything that is not one, or is larger than any trace."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.file_size > MOST_BYTES:
                    raise TraceError(
                        f"{path.name}: member {info.filename} unpacks to {info.file_size} bytes; at most "
                        f"{MOST_BYTES} are read"
                    )
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        raise TraceError(f"there is no trace {path}") from None
    except _UNREADABLE as error:
        reason = "it holds Python objects, which are never loaded" if "pickle" in str(error) else str(error)
        raise TraceError(f"{path.name} is no trace: {reason}") from error


def read_trace(path: Path) -> Trace:
    """Read a file of the format above; `importers` read others. TraceError names the file and what is wrong."""
    members = read_members(path)
    if "topk_ids" not in members:
        raise TraceError(f"{path.name} holds {', '.join(sorted(members)) or 'nothing'}, but no topk_ids")
    return from_members(members, path.name)


def from_members(members: Mapping[str, npt.NDArray[Any]], name: str) -> Trace:
    """A trace from the arrays of a file."""
    metadata = _metadata(members.get("metadata"), name)
    experts = metadata.get("num_experts")
    if experts is not None and (not isinstance(experts, int) or isinstance(experts, bool)):
        raise TraceError(f"{name}: metadata says num_experts is {experts!r}; it is a number")
    for column in ("lengths", "prompts", "batches"):
        if column in members:
            _integers(members[column], f"{name}: {column}")
    prefill = members.get("prefill")
    if prefill is not None and prefill.dtype != np.bool_:
        raise TraceError(f"{name}: prefill is {prefill.dtype}, not bool")
    return make_trace(
        _integers(members["topk_ids"], f"{name}: topk_ids"),
        experts=experts,
        lengths=members.get("lengths"),
        prompts=members.get("prompts"),
        batches=members.get("batches"),
        prefill=prefill,
        metadata=metadata,
        name=name,
    )


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace so that readers see the old file or the whole new one. TraceError if the disk refuses."""
    kind = next(k for k in (np.uint8, np.uint16, np.int32) if trace.experts - 1 <= np.iinfo(k).max)
    metadata = {**trace.metadata, "num_experts": trace.experts}
    members: dict[str, Any] = {
        "topk_ids": trace.ids.astype(kind),
        "lengths": trace.lengths,
        "prompts": trace.prompts,
        "metadata": np.frombuffer(json.dumps(metadata, sort_keys=True).encode(), dtype=np.uint8),
    }
    if trace.batches is not None:
        members["batches"] = trace.batches
    if trace.prefill is not None:
        members["prefill"] = trace.prefill
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            np.savez_compressed(file, **members)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def _integers(array: npt.NDArray[Any], what: str) -> npt.NDArray[np.integer]:
    if array.dtype.kind not in "iu":
        raise TraceError(f"{what} is {array.dtype}, not integers")
    return array


def _column(values: npt.ArrayLike | None, length: int, default: int, what: str) -> IntArray:
    if values is None:
        return np.full(length, default, dtype=np.int64)
    return _integers(np.asarray(values), what).astype(np.int64)


def _metadata(raw: npt.NDArray[Any] | None, name: str) -> dict[str, Any]:
    if raw is None:
        return {}
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.size > _METADATA_BYTES:
        raise TraceError(f"{name}: metadata is {raw.dtype} {list(raw.shape)}, not the bytes of a JSON object")
    try:
        found = json.loads(raw.tobytes().decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TraceError(f"{name}: metadata is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise TraceError(f"{name}: metadata is no JSON object")
    return found


def _check(trace: Trace) -> None:
    name, ids = trace.name, trace.ids
    sequences, positions, _, top_k = ids.shape
    if not 1 <= trace.experts <= MOST_EXPERTS:
        raise TraceError(f"{name}: num_experts is {trace.experts}; it is 1 to {MOST_EXPERTS}")
    if int(ids.max()) >= trace.experts or int(ids.min()) < 0:
        raise TraceError(f"{name}: topk_ids holds {int(ids.max())}, but experts are 0..{trace.experts - 1}")
    if top_k > trace.experts:
        raise TraceError(f"{name}: {top_k} choices of {trace.experts} experts")
    for what, column, most in (("lengths", trace.lengths, positions), ("prompts", trace.prompts, positions)):
        if column.shape != (sequences,):
            raise TraceError(f"{name}: {what} is {list(column.shape)}, expected [{sequences}]")
        if column.min() < 0 or column.max() > most:
            raise TraceError(f"{name}: {what} holds {int(column.max())}, a sequence has 0..{most} positions")
    if (trace.prompts > trace.lengths).any():
        raise TraceError(f"{name}: a prompt is longer than its sequence")
    if trace.batches is None:
        if trace.prefill is not None:
            raise TraceError(f"{name}: prefill without batches; say prompts instead")
        return
    b = trace.batches
    if (
        sequences != 1
        or b.ndim != 1
        or b.size < 1
        or b[0] != 0
        or (np.diff(b) < 0).any()
        or b[-1] != positions
    ):
        raise TraceError(
            f"{name}: batches has to rise from 0 to the {positions} positions of the one sequence"
        )
    if trace.prefill is not None and trace.prefill.shape != (positions,):
        raise TraceError(f"{name}: prefill is {list(trace.prefill.shape)}, expected [{positions}]")
