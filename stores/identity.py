"""What a checkpoint is, independent of where it lies: a digest of content.

It covers every safetensors header byte for byte (tensor names, dtypes, shapes, offsets), the bytes of small files, an
evenly spread sample of pages of large ones, and the FP8 block shape that config.json states, since that decides what
the stored numbers mean. Paths, file names, times and config.json otherwise take no part.

A folder whose expert tensors were left out keeps the identity of the whole, see `manifest.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.headers import FileHeader
from ziggurat.stores.modelconfig import stated_block
from ziggurat.stores.shards import read_shards

PAGE = 4096
SAMPLED_PAGES = 256
WHOLE_BELOW = 32 << 20  # bytes of data up to which a file is digested in full
_VERSION = b"ziggurat checkpoint identity 1\n"
_PIECE = 1 << 20


def checkpoint_identity(folder: Path) -> str:
    """64 hex digits. Raises CheckpointError if the folder holds no readable checkpoint."""
    folder = Path(folder)
    return identity_of(read_shards(folder).headers, stated_block(folder))


def identity_of(headers: Sequence[FileHeader], block: tuple[int, int] | None) -> str:
    """`checkpoint_identity` from headers that were read already."""
    with ThreadPoolExecutor(min(8, len(headers))) as threads:
        digests = list(threads.map(file_digest, headers))
    total = hashlib.sha256(_VERSION)
    if block is not None:
        total.update(b"block %d %d\n" % block)
    for digest in sorted(digests):  # file names and their order do not matter
        total.update(digest)
    return total.hexdigest()


def sample_offsets(data_bytes: int) -> list[tuple[int, int]]:
    """The (offset, length) pieces of a data section that are digested. First and last bytes are always among them."""
    if data_bytes <= WHOLE_BELOW:
        return [(at, min(_PIECE, data_bytes - at)) for at in range(0, data_bytes, _PIECE)]
    last = data_bytes - PAGE
    return [(last * i // (SAMPLED_PAGES - 1), PAGE) for i in range(SAMPLED_PAGES)]


def file_digest(header: FileHeader) -> bytes:
    """One file's part of the identity: its header, and its data or a sample of that. Raises CheckpointError."""
    digest = hashlib.sha256(header.raw)
    digest.update(b"%d\n" % header.data_bytes)
    try:
        fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead around single pages
            for offset, length in sample_offsets(header.data_bytes):
                piece = os.pread(fd, length, header.data_start + offset)
                if len(piece) != length:
                    raise CheckpointError(f"{header.path}: the file changed while it was being read")
                digest.update(piece)
        finally:
            os.close(fd)
    except OSError as e:
        raise CheckpointError(f"{header.path}: cannot be read: {e.strerror}") from e
    return digest.digest()
