"""Chunks: the unit of work of a build. Some experts of one layer are read, encoded and written in one go.

Reading, encoding and writing overlap because several chunks are under way at once, each in a lane of its own: a thread,
or a process. What a lane takes of memory is known beforehand, so that the number of lanes bounds the build's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.encoder import BatchRowEncoder, RowEncoder
from ziggurat.stores.loading import ExpertLoader, Memory, extents_bytes
from ziggurat.stores.packformat import row_digest
from ziggurat.stores.rowfile import RowFile
from ziggurat.stores.stored import StoredExpert

#: Source bytes of a chunk, if an expert is not larger: long reads and writes, and many chunks for many lanes.
CHUNK_BYTES = 16 << 20

WORKING_BYTES_PER_WEIGHT = 16
THREAD_BYTES = 6 << 20

Digests = list[dict[int, int]]  # by place in the list of files: expert -> digest


@dataclass(frozen=True, slots=True)
class Chunk:
    """experts: of a layer (by index), ascending. missing: by place in the list of files, those that it lacks."""

    layer: int
    experts: tuple[int, ...]
    missing: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return sum(len(experts) for experts in self.missing)


def experts_per_chunk(checkpoint: Checkpoint) -> int:
    """How many experts a chunk holds."""
    return max(1, min(CHUNK_BYTES // extents_bytes(checkpoint, 0, [0]), checkpoint.experts))


def chunks_of(layer: int, missing: Sequence[Sequence[int]], per_chunk: int) -> Iterator[Chunk]:
    """The work on a layer. missing: by place in the list of files, the experts that it lacks."""
    wanted = sorted(set().union(*missing))
    for begin in range(0, len(wanted), per_chunk):
        experts = tuple(wanted[begin : begin + per_chunk])
        lacks = tuple(tuple(e for e in experts if e in frozenset(of_file)) for of_file in missing)
        yield Chunk(layer, experts, lacks)


class Lane:
    """Works on one chunk at a time. The files are the ranks of one tensor-parallel size."""

    def __init__(
        self, checkpoint: Checkpoint, loader: ExpertLoader, encoder: RowEncoder, files: Sequence[RowFile]
    ) -> None:
        self._loader, self._encoder, self._files = loader, encoder, files
        self._memory = Memory()
        self._per_chunk = experts_per_chunk(checkpoint)
        self._buffers = [aligned_buffer(self._per_chunk * file.header.stride) for file in files]

    def build(self, chunk: Chunk) -> Digests:
        """Read, encode and write a chunk; returns what the rows written must have as checksums.

        Raises CheckpointError, DiskFullError, PackWriteError, and whatever the encoder raises.
        """
        experts = self._loader.load(chunk.layer, chunk.experts, self._memory)
        self.encode(experts)
        return [
            self._write(place, chunk.layer, chunk.experts, frozenset(missing))
            for place, missing in enumerate(chunk.missing)
        ]

    def encode(self, experts: Sequence[StoredExpert]) -> None:
        """Make the rows of all files for some experts, at most a chunk's."""
        outs = {}
        for file, buffer in zip(self._files, self._buffers, strict=True):
            header = file.header
            rows = torch.frombuffer(buffer, dtype=torch.uint8).view(-1, header.stride)[: len(experts)]
            rows.zero_()  # bytes an encoder leaves alone must not come from another expert
            outs[header.tp_rank] = rows[:, : header.row_bytes]
        tp_size = self._files[0].header.tp_size
        if isinstance(self._encoder, BatchRowEncoder):
            self._encoder.encode_many(experts, tp_size, outs)
            return
        for i, expert in enumerate(experts):
            self._encoder.encode(expert, tp_size, {rank: rows[i] for rank, rows in outs.items()})

    def _write(
        self, place: int, layer: int, experts: Sequence[int], missing: frozenset[int]
    ) -> dict[int, int]:
        file, buffer = self._files[place], self._buffers[place]
        stride = file.header.stride
        digests = {}
        begin = 0
        while begin < len(experts):
            end = begin + 1
            if experts[begin] in missing:
                while end < len(experts) and experts[end] == experts[end - 1] + 1 and experts[end] in missing:
                    end += 1
                file.write_rows(layer, experts[begin], buffer[begin * stride : end * stride])
                for i in range(begin, end):
                    digests[experts[i]] = row_digest(buffer[i * stride : (i + 1) * stride])
            begin = end
        return digests


def lane_bytes(checkpoint: Checkpoint, strides: Sequence[int]) -> int:
    """Upper bound of what one lane takes: a chunk as it is read, its rows for every file, and its thread.

    That is a stack and what an allocator holds back for a thread.
    """
    per_chunk = experts_per_chunk(checkpoint)
    source = max(
        extents_bytes(checkpoint, layer, range(per_chunk)) for layer in range(len(checkpoint.layer_ids))
    )
    return source + per_chunk * sum(strides) + THREAD_BYTES


def working_bytes(checkpoint: Checkpoint) -> int:
    """Upper bound of what quantizing takes, for each that goes on at once.

    That is 16 bytes per weight of one matrix (codecs work in tiles and were measured to take 1 to 4).
    """
    return WORKING_BYTES_PER_WEIGHT * checkpoint.hidden * checkpoint.intermediate
