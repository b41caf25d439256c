"""The pack file's format: a safetensors file with one u8 tensor of rows and one u64 tensor of checksums.

bytes 0..8          header length, little endian
header              JSON, padded with spaces so that the data starts on a 4 KiB boundary
rows                u8  [layers, experts, stride]; row (l, e) starts at data + (l * experts + e) * stride
checksums           u64 [layers, experts]; xxh3-64 of the row's `stride` bytes, 0 = row absent
"""

from __future__ import annotations

from dataclasses import dataclass

PACK_FORMAT_VERSION = 1
ALIGNMENT = 4096


def stride_of(row_bytes: int) -> int:
    """Bytes a row takes in a pack, an arena and a pool: `row_bytes` rounded up to 4 KiB."""
    return -(-row_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackHeader:
    """What a pack holds. `hidden` and `intermediate` are the whole model's, not one rank's.

    row_bytes: payload of one row; stride: the same rounded up to 4 KiB. layer_ids: the model's own number of
    each MoE layer, in order of layer index.
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


def pack_filename(header: PackHeader) -> str:
    """The file name of a complete pack."""
    return (
        f"{header.codec}.v{PACK_FORMAT_VERSION}.{header.identity[:20]}"
        f".tp{header.tp_rank}of{header.tp_size}.safetensors"
    )
