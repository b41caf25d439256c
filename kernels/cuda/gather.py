"""Copy rows from mapped host memory into slots with one kernel per 200 rows.

For small rows it beats the copy engine, which pays per copy; for rows of a megabyte and more the copy engine is
faster. The list of rows travels in the kernel's parameter: no staging buffer, no copy before the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ziggurat.kernels.cuda.errors import LaunchError
from ziggurat.kernels.cuda.library import kernel

MAX_ROWS = 200
THREADS = 512
VECTOR = 16  # bytes of one load; sources, destinations and sizes are multiples
CHUNK = 8 * THREADS * VECTOR  # bytes that a block copies at a time
# Eight blocks of 64 KiB in flight saturate PCIe 5 x16 on an H200; a few more hide the ends of rows.
BLOCKS = 32


class GatherParams(ctypes.Structure):
    """The kernel's struct (src/gather.cu); `vectors` are sizes in units of 16 bytes."""

    _fields_ = (
        ("dst", ctypes.c_uint64 * MAX_ROWS),
        ("src", ctypes.c_uint64 * MAX_ROWS),
        ("vectors", ctypes.c_uint32 * MAX_ROWS),
        ("rows", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class GatherKernel:
    """Moves rows by loads from mapped host memory; a RowMover.

    Addresses are device addresses: those of page-locked memory as the GPU sees it, and of the pool.
    """

    def __init__(self, device: int, *, blocks: int = BLOCKS) -> None:
        """Load the kernel onto device number `device`. Raises UnsupportedGpuError, ImageError or CudaError."""
        self._kernel = kernel("gather_rows", device)
        self._blocks = blocks

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        """Enqueue the copy of every row on `stream`: nbytes[i] bytes from src[i] to dst[i]. Does not wait.

        Addresses and sizes are multiples of 16; rows do not overlap. Sources stay as they are until the copy is done.
        Raises LaunchError for lists of different lengths and for what is not a multiple of 16.
        """
        for params, blocks in batches(dst, src, nbytes, self._blocks):
            self._kernel.launch(blocks, THREADS, params, stream=stream)


def batches(
    dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], most: int = BLOCKS
) -> list[tuple[GatherParams, int]]:
    """The launches that copy these rows: the parameter of each and its number of blocks, at most `most`.

    Raises LaunchError for lists of different lengths and for what is not a multiple of 16.
    """
    columns = (np.array(dst, np.uint64), np.array(src, np.uint64), np.array(nbytes, np.uint64))
    lengths = tuple(len(column) for column in columns)
    if len(set(lengths)) != 1:
        raise LaunchError(f"lists of {lengths[0]} destinations, {lengths[1]} sources and {lengths[2]} sizes")
    for name, column in zip(("destination", "source", "size"), columns, strict=True):
        if (odd := column % VECTOR != 0).any():
            row = int(odd.argmax())
            raise LaunchError(f"row {row}: {name} {int(column[row]):#x} is not a multiple of {VECTOR}")
    vectors = columns[2] // VECTOR
    if (large := vectors >= 1 << 31).any():
        row = int(large.argmax())
        raise LaunchError(f"row {row} has {int(columns[2][row])} bytes; the kernel copies less than 32 GiB")
    made: list[tuple[GatherParams, int]] = []
    for start in range(0, lengths[0], MAX_ROWS):
        count = min(MAX_ROWS, lengths[0] - start)
        params = GatherParams(rows=count)
        here = slice(start, start + count)
        np.frombuffer(params.dst, np.uint64)[:count] = columns[0][here]
        np.frombuffer(params.src, np.uint64)[:count] = columns[1][here]
        np.frombuffer(params.vectors, np.uint32)[:count] = vectors[here]
        chunks = int((-(-columns[2][here].astype(np.int64) // CHUNK)).sum())
        if chunks:
            made.append((params, min(most, chunks)))
    return made
