"""The pack file's format: a safetensors file with one u8 tensor of rows and one u64 tensor of checksums.

    bytes 0..8   header length, little endian
    header       JSON, padded with spaces so that the data starts on a 4 KiB boundary; `__metadata__` holds PackHeader
    rows         u8  [layers, experts, stride]; row (l, e) starts at data + (l * experts + e) * stride
    checksums    u64 [layers, experts]; xxh3-64 of the row's `stride` bytes, 0 = row absent

The header is a function of PackHeader alone, so that one that differs in any byte is known to be damaged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import xxhash

from ziggurat.stores.errors import HeaderError, PackCorruptError, PackMismatchError, PackTruncatedError
from ziggurat.stores.headers import LENGTH_BYTES, FileHeader, read_open_header

PACK_FORMAT = "ziggurat-pack"
PACK_FORMAT_VERSION = 1
ALIGNMENT = 4096
ABSENT = 0  # checksum of a row that was never written
CHECKSUM_BYTES = 8
_REBUILD = "delete it and run `ziggurat pack` again"


def stride_of(row_bytes: int) -> int:
    """Bytes a row takes in a pack, an arena and a pool: `row_bytes` rounded up to 4 KiB."""
    return -(-row_bytes // ALIGNMENT) * ALIGNMENT


def row_digest(row: memoryview) -> int:
    """The checksum of a row's `stride` bytes. A digest that is really 0 counts as 1, since 0 means absent."""
    return xxhash.xxh3_64_intdigest(row) or 1


@dataclass(frozen=True)
class PackHeader:
    """What a pack holds. `hidden` and `intermediate` are the whole model's, not one rank's.

    row_bytes: payload of one row; stride: the same rounded up to 4 KiB. layer_ids: the model's own number of
    each MoE layer, in order of layer index. Raises ValueError for values that make no pack.
    """

    codec: str
    codec_version: str
    layers: int
    experts: int
    hidden: int
    intermediate: int
    row_bytes: int
    stride: int
    tp_rank: int
    tp_size: int
    identity: str
    layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "hidden", "intermediate", "row_bytes", "tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.stride != stride_of(self.row_bytes):
            raise ValueError(f"stride is {self.stride} for rows of {self.row_bytes} bytes")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank is {self.tp_rank} of tp_size {self.tp_size}")
        if len(self.layer_ids) != self.layers or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids {list(self.layer_ids)} are not {self.layers} rising numbers")
        for name in ("codec", "identity"):
            value = getattr(self, name)
            if not value or not value.isascii() or not value.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"{name} is {value!r}, which no file name can hold")

    @property
    def rows(self) -> int:
        return self.layers * self.experts

    @property
    def rows_nbytes(self) -> int:
        return self.rows * self.stride

    def row_offset(self, layer: int, expert: int) -> int:
        """Where a row starts within the data section."""
        return (layer * self.experts + expert) * self.stride


def pack_filename(header: PackHeader) -> str:
    """The file name of a complete pack."""
    return (
        f"{header.codec}.v{PACK_FORMAT_VERSION}.{header.identity[:20]}"
        f".tp{header.tp_rank}of{header.tp_size}.safetensors"
    )


def header_bytes(header: PackHeader) -> bytes:
    """Everything before the data section; a multiple of 4 KiB long."""
    rows, table = header.rows_nbytes, header.rows * CHECKSUM_BYTES
    shape = [header.layers, header.experts]
    entries = {
        "__metadata__": _to_metadata(header),
        "rows": {"dtype": "U8", "shape": [*shape, header.stride], "data_offsets": [0, rows]},
        "checksums": {"dtype": "U64", "shape": shape, "data_offsets": [rows, rows + table]},
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = stride_of(LENGTH_BYTES + len(text)) - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def file_bytes(header: PackHeader) -> int:
    """Length of the whole pack file."""
    return len(header_bytes(header)) + header.rows_nbytes + header.rows * CHECKSUM_BYTES


def read_pack_header(path: Path, fd: int) -> tuple[PackHeader, int]:
    """Read and check an open pack file's header; returns it and where the data section starts.

    Raises PackTruncatedError, PackCorruptError, or PackMismatchError for another format version.
    """
    try:
        found = read_open_header(path, fd)
    except HeaderError as e:
        kind = PackTruncatedError if e.kind == "truncated" else PackCorruptError
        raise kind(path, f"{e.problem}; {_REBUILD}") from e
    return _from_metadata(path, found), found.data_start


def check_expected(path: Path, expected: PackHeader, found: PackHeader) -> None:
    """Raises PackMismatchError naming the first field in which a pack is not the one wanted.

    Causes come before what follows from them: another model or another division also has other row sizes.
    """
    names = [field.name for field in fields(PackHeader)]
    for name in sorted(names, key=lambda name: (name not in _CAUSES, names.index(name))):
        want, have = getattr(expected, name), getattr(found, name)
        if want != have:
            raise PackMismatchError(path, name, _plain(want), _plain(have), _advice(name))


_CAUSES = ("codec", "codec_version", "identity", "tp_rank", "tp_size")


def _advice(field: str) -> str:
    if field == "identity":
        return "it was packed from another checkpoint: run `ziggurat pack` for this one, in another folder"
    if field in ("tp_rank", "tp_size"):
        return "run `ziggurat pack` with --tp for this tensor-parallel size"
    return _REBUILD


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _to_metadata(header: PackHeader) -> dict[str, str]:
    metadata = {"format": PACK_FORMAT, "format_version": str(PACK_FORMAT_VERSION)}
    for field in fields(PackHeader):
        value = getattr(header, field.name)
        metadata[field.name] = json.dumps(value) if isinstance(value, tuple) else str(value)
    metadata["digest"] = _metadata_digest(metadata)
    return metadata


def _metadata_digest(metadata: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(metadata, separators=(",", ":")).encode())


def _from_metadata(path: Path, file: FileHeader) -> PackHeader:
    metadata = file.metadata
    if metadata.get("format") != PACK_FORMAT:
        raise PackCorruptError(path, f"a safetensors file, but no pack (format {metadata.get('format')!r})")
    version = metadata.get("format_version", "")
    if version != str(PACK_FORMAT_VERSION):
        raise PackMismatchError(path, "format_version", PACK_FORMAT_VERSION, version, _REBUILD)
    try:
        header = PackHeader(
            codec=metadata["codec"],
            codec_version=metadata["codec_version"],
            layers=int(metadata["layers"]),
            experts=int(metadata["experts"]),
            hidden=int(metadata["hidden"]),
            intermediate=int(metadata["intermediate"]),
            row_bytes=int(metadata["row_bytes"]),
            stride=int(metadata["stride"]),
            tp_rank=int(metadata["tp_rank"]),
            tp_size=int(metadata["tp_size"]),
            identity=metadata["identity"],
            layer_ids=_numbers(metadata["layer_ids"]),
        )
    except KeyError as e:
        raise PackCorruptError(path, f"its metadata lacks {e.args[0]}; {_REBUILD}") from e
    except ValueError as e:
        raise PackCorruptError(path, f"its metadata is damaged: {e}; {_REBUILD}") from e
    written = header_bytes(header)[LENGTH_BYTES:]
    if written != file.raw:
        at = next((i for i, (a, b) in enumerate(zip(written, file.raw, strict=False)) if a != b), -1)
        raise PackCorruptError(path, f"its header is damaged (first at byte {LENGTH_BYTES + at}); {_REBUILD}")
    return header


def _numbers(text: str) -> tuple[int, ...]:
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise ValueError("layer_ids are nested") from e
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"layer_ids are {text[:80]!r}")
    return tuple(value)
