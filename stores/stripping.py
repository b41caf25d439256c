"""Writing a checkpoint's files without its expert tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ziggurat.stores.errors import ExportError
from ziggurat.stores.headers import DTYPE_BITS, LENGTH_BYTES, FileHeader, TensorInfo, read_header
from ziggurat.stores.identity import file_digest
from ziggurat.stores.manifest import FileFacts
from ziggurat.stores.writing import sync_folder, writing

PART_SUFFIX = ".part"
_PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class StrippedShard:
    """What becomes of one file. kept: its remaining tensors' header entries in the file that is there, in new order.

    raw: the header that is written, without its length.
    """

    source: FileHeader
    kept: tuple[TensorInfo, ...]
    raw: bytes

    @property
    def name(self) -> str:
        return self.source.path.name

    @property
    def nbytes(self) -> int:
        """Length of the file that is written."""
        return LENGTH_BYTES + len(self.raw) + sum(info.nbytes for info in self.kept)


def strip_shard(header: FileHeader, names: frozenset[str]) -> StrippedShard | None:
    """A file without the tensors `names`: as it is if it holds none of them, None if it holds nothing else."""
    kept = sorted((info for info in header.tensors.values() if info.name not in names), key=lambda t: t.begin)
    if len(kept) == len(header.tensors):
        return StrippedShard(header, tuple(kept), header.raw)
    if not kept:
        return None
    # Wider types first, as safetensors' own writer has it, so that no tensor is misaligned.
    kept.sort(key=lambda info: (-DTYPE_BITS[info.dtype], info.begin))
    return StrippedShard(header, tuple(kept), _header(header, kept))


def _header(header: FileHeader, kept: list[TensorInfo]) -> bytes:
    entries: dict[str, object] = {"__metadata__": header.metadata} if header.metadata else {}
    at = 0
    for info in kept:
        offsets = [at, at + info.nbytes]
        entries[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
        at += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def write_stripped(shard: StrippedShard, folder: Path, advance: Callable[[int], None]) -> FileFacts:
    """Write a shard into `folder` under its name; the name appears when everything is on the disk.

    advance: told the bytes as they are written. Raises DiskFullError, PackWriteError, ExportError.
    """
    facts = write_file(folder / shard.name, _content(shard), shard.nbytes, advance)
    try:
        sample = file_digest(read_header(folder / shard.name))
    except OSError as e:
        raise ExportError(f"{folder / shard.name}: cannot be read back: {e.strerror}") from e
    return FileFacts(facts.nbytes, facts.sha256, sample.hex())


def write_file(
    path: Path, content: Iterator[bytes], nbytes: int, advance: Callable[[int], None] = lambda _: None
) -> FileFacts:
    """Write a file of `nbytes` bytes that is there as a whole or not at all. Raises DiskFullError, PackWriteError."""
    part = path.with_name(path.name + PART_SUFFIX)
    digest, done = hashlib.sha256(), 0
    try:
        with writing(part, lambda: nbytes - done):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                for piece in content:
                    digest.update(piece)
                    written = 0
                    while written < len(piece):
                        written += os.write(fd, memoryview(piece)[written:])
                    done += len(piece)
                    advance(len(piece))
                os.fsync(fd)
            finally:
                os.close(fd)
            part.rename(path)
            sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return FileFacts(done, digest.hexdigest())


def _content(shard: StrippedShard) -> Iterator[bytes]:
    yield len(shard.raw).to_bytes(LENGTH_BYTES, "little") + shard.raw
    source = shard.source
    with _reading(source.path) as read:
        for begin, end in _runs(shard.kept):
            for at in range(begin, end, _PIECE):
                wanted = min(_PIECE, end - at)
                piece = read(source.data_start + at, wanted)
                if len(piece) != wanted:
                    raise ExportError(f"{source.path}: the file changed while it was being read")
                yield piece


def _runs(kept: tuple[TensorInfo, ...]) -> Iterator[tuple[int, int]]:
    """The kept tensors' places in order, those that follow each other as one."""
    begin = end = 0
    for info in kept:
        if info.begin != end:
            yield begin, end
            begin = info.begin
        end = info.end
    yield begin, end


def file_content(path: Path) -> Iterator[bytes]:
    """A file's bytes, piece by piece. Raises ExportError if it cannot be read."""
    with _reading(path) as read:
        at = 0
        while piece := read(at, _PIECE):
            yield piece
            at += len(piece)


@contextmanager
def _reading(path: Path) -> Iterator[Callable[[int, int], bytes]]:
    """A function that reads (offset, length), fewer bytes only at the file's end.

    Its errors are ExportError: one of the source must not pass for one of the folder that is written to.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise ExportError(f"{path}: cannot be read: {e.strerror}") from e

    def read(at: int, nbytes: int) -> bytes:
        found = bytearray()
        try:
            while len(found) < nbytes and (piece := os.pread(fd, nbytes - len(found), at + len(found))):
                found += piece
        except OSError as e:
            raise ExportError(f"{path}: cannot be read: {e.strerror}") from e
        return bytes(found)

    try:
        yield read
    finally:
        os.close(fd)
