"""Reading safetensors headers that may be damaged or hostile.

Written for this project because every tensor of a checkpoint is checked from the headers alone, and because
the errors must name the file, the tensor and the value. The rules are those of the safetensors format: an
8-byte little-endian header length, a JSON object of that many bytes, then the data, which the tensors cover
without gap or overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.stores.errors import HeaderError
from ziggurat.stores.strict_json import JsonError, is_unicode, parse_object, shortened

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
LENGTH_BYTES = 8

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a header. `begin` and `end` count from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A parsed header. `data_start`: where the data section begins. `raw`: the header's bytes in the file."""

    path: Path
    data_start: int
    data_bytes: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes


def read_header(path: Path) -> FileHeader:
    """Read and check the header of a safetensors file, and that the file is exactly as long as it says.

    Memory follows the bytes that the header really has in the file (about ten times as many; at most forty times, for
    one that is made to cost memory), never a number that it states. Raises HeaderError for anything that is not a sound
    safetensors file, and OSError when the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_open_header(path, fd)
    finally:
        os.close(fd)


def read_open_header(path: Path, fd: int) -> FileHeader:
    """`read_header` of a file that is open already; `path` is for messages."""
    size = os.fstat(fd).st_size
    if size < LENGTH_BYTES:
        raise HeaderError(path, "truncated", f"{size} bytes long, too short for a safetensors header")
    length = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise _malformed(path, f"header length {length} is over the limit of {MAX_HEADER_BYTES}")
    if length > size - LENGTH_BYTES:
        raise HeaderError(path, "truncated", f"header length {length} does not fit in a file of {size} bytes")
    raw = bytearray()
    while len(raw) < length:
        piece = os.pread(fd, length - len(raw), LENGTH_BYTES + len(raw))
        if not piece:
            raise HeaderError(path, "truncated", f"the file ends inside its header of {length} bytes")
        raw += piece
    return parse_header(path, bytes(raw), size)


def parse_header(path: Path, raw: bytes, file_size: int) -> FileHeader:
    """Check a header's bytes against the size of the file they stand in. Raises HeaderError."""
    entries = _json_object(path, raw)
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    data_bytes = file_size - LENGTH_BYTES - len(raw)
    tensors = {name: _tensor(path, name, entry) for name, entry in entries.items()}
    _check_cover(path, tensors.values(), data_bytes)
    return FileHeader(path, LENGTH_BYTES + len(raw), data_bytes, tensors, metadata, raw)


def _malformed(path: Path, problem: str) -> HeaderError:
    return HeaderError(path, "malformed", problem)


def _json_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        return parse_object(raw, "header")
    except JsonError as e:
        raise _malformed(path, str(e)) from e


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _malformed(path, "__metadata__ is not a JSON object")
    for key, item in value.items():
        if not isinstance(item, str):
            raise _malformed(path, f"__metadata__ entry {shortened(key)} is not a string")
        if not (is_unicode(key) and is_unicode(item)):
            raise _malformed(path, f"__metadata__ entry {shortened(key)} is not valid Unicode")
    return value


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    def bad(problem: str) -> HeaderError:
        return _malformed(path, f"tensor {shortened(name)}: {problem}")

    if not is_unicode(name):
        raise bad("the name is not valid Unicode")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad("the entry does not hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise bad(f"unknown dtype {shortened(dtype)}")
    if not _are_sizes(shape):
        raise bad(f"shape {shortened(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise bad(f"data_offsets {shortened(offsets)} are not two byte offsets")
    begin, end = offsets
    if begin > end:
        raise bad(f"data_offsets {shortened(offsets)} run backwards")
    elements = 0 if 0 in shape else 1
    for size in shape:
        elements *= size
        if elements * bits > (end - begin) * 8:
            break  # no need to multiply a long list of huge numbers out
    if elements * bits != (end - begin) * 8:
        raise bad(f"shape {shortened(shape)} of {dtype} does not fill its {end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_cover(path: Path, tensors: Iterable[TensorInfo], data_bytes: int) -> None:
    reached, before = 0, ""
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin < reached:
            raise _malformed(path, f"tensor {shortened(tensor.name)} overlaps {shortened(before)}")
        if tensor.begin > reached:
            gap = tensor.begin - reached
            raise _malformed(path, f"{gap} bytes before tensor {shortened(tensor.name)} belong to no tensor")
        reached, before = tensor.end, tensor.name
    if reached > data_bytes:
        problem = f"{data_bytes} bytes of data, {reached - data_bytes} fewer than its header says"
        raise HeaderError(path, "truncated", problem)
    if reached < data_bytes:
        problem = f"{data_bytes} bytes of data, {data_bytes - reached} more than its header says"
        raise HeaderError(path, "extended", problem)
