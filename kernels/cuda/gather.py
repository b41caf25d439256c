"""Copy rows from mapped host memory into slots with one kernel per 200 rows.

For small rows it beats the copy engine, which pays per copy; for rows of a megabyte and more the copy engine is
faster. The list of rows travels in the kernel's parameter: no staging buffer, no copy before the copy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ziggurat.kernels.cuda.errors import LaunchError
from ziggurat.kernels.cuda.library import kernel

MAX_ROWS = 200
THREADS = 512
VECTOR = 16  # bytes of one load; sources, destinations and sizes are multiples
CHUNK = 8 * THREADS * VECTOR  # bytes that a block copies at a time
# Eight blocks of 64 KiB in flight saturate PCIe 5 x16 on an H200; a few more hide the ends of rows.
BLOCKS = 32
_LARGEST = 32 << 30  # so that the kernel counts vectors in 32 bits


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

    Addresses are device addresses: those of page-locked memory as the GPU sees it, and of the pool. One object may be
    used by several threads.
    """

    def __init__(self, device: int, *, blocks: int = BLOCKS) -> None:
        """Load the kernel onto device number `device`. Raises UnsupportedGpuError, ImageError or CudaError."""
        self.kernel = kernel("gather_rows", device)
        self._blocks = blocks
        self._batch = Batch()
        self._lock = threading.Lock()

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        """Enqueue the copy of every row on `stream`: nbytes[i] bytes from src[i] to dst[i]. Does not wait.

        Addresses and sizes are multiples of 16; rows do not overlap. Sources stay as they are until the copy is done.
        Raises LaunchError for lists of different lengths and for what is not a multiple of 16.
        """
        rows = columns(dst, src, nbytes)
        with self._lock:  # a launch copies its parameter, so the next one can refill it
            for start in range(0, rows.shape[1], MAX_ROWS):
                chunks = self._batch.fill(rows[:, start : start + MAX_ROWS])
                if chunks:
                    blocks = min(self._blocks, chunks)
                    self.kernel.launch(blocks, THREADS, self._batch.params, stream=stream)


class Batch:
    """The parameter of one launch, refilled in place."""

    def __init__(self) -> None:
        self.params = GatherParams()
        self._dst = np.frombuffer(self.params.dst, np.uint64)
        self._src = np.frombuffer(self.params.src, np.uint64)
        self._vectors = np.frombuffer(self.params.vectors, np.uint32)

    def fill(self, rows: npt.NDArray[np.uint64]) -> int:
        """Take the rows of a [3, up to 200] part of `columns`; returns how many chunks they are."""
        count = rows.shape[1]
        self.params.rows = count
        self._dst[:count] = rows[0]
        self._src[:count] = rows[1]
        self._vectors[:count] = rows[2] // VECTOR
        return int(((rows[2] + (CHUNK - 1)) // CHUNK).sum())


def columns(dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Destinations, sources and sizes as uint64 [3, rows]. Raises LaunchError for what the kernel cannot copy."""
    if not len(dst) == len(src) == len(nbytes):
        raise LaunchError(f"lists of {len(dst)} destinations, {len(src)} sources and {len(nbytes)} sizes")
    rows = np.array((dst, src, nbytes), np.uint64)
    if np.bitwise_or.reduce(rows, axis=None) % VECTOR:
        which, row = (int(i[0]) for i in np.nonzero(rows % VECTOR))
        name = ("destination", "source", "size")[which]
        raise LaunchError(f"row {row}: {name} {int(rows[which, row]):#x} is not a multiple of {VECTOR}")
    if rows.shape[1] and rows[2].max() >= _LARGEST:
        row = int(rows[2].argmax())
        raise LaunchError(f"row {row} has {int(rows[2, row])} bytes; the kernel copies less than 32 GiB")
    return rows
