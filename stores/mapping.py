"""Checkpoint files mapped into memory, their tensors as views of the mapping."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable

import torch

from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.headers import FileHeader, TensorInfo

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
}
# Linux; Python names it from 3.13 on. Without it a private mapping larger than free memory can be refused.
_MAP_NORESERVE = 0x4000


class MappedFile:
    """One file of a checkpoint. The mapping lives as long as this object or any tensor made from it.

    It is private and writable only because PyTorch has no read-only tensors: nothing reaches the file.
    """

    def __init__(self, header: FileHeader) -> None:
        fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != header.data_start + header.data_bytes:
                raise CheckpointError(f"{header.path}: the file changed while it was being opened")
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            self._map = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self._path = header.path
        self._data_start = header.data_start

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """A tensor over the file's bytes; a copy only if the file stores it misaligned for its dtype."""
        dtype = TORCH_DTYPES[info.dtype]
        offset = self._data_start + info.begin
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        if offset % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=offset)
            return raw.clone().view(dtype).view(info.shape)
        count = info.nbytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(info.shape)

    def read(self, info: TensorInfo, index: int | None = None) -> torch.Tensor:
        """A tensor, or `index` of its first dimension, copied by ordinary reads.

        A process that touches a mapping of a file that was cut, or whose disk fails, is killed; here it is an OSError.
        """
        dtype = TORCH_DTYPES[info.dtype]
        shape = info.shape if index is None else info.shape[1:]
        nbytes = info.nbytes if index is None else info.nbytes // info.shape[0]
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.empty(nbytes, dtype=torch.uint8)
        view = raw.numpy().data
        offset = self._data_start + info.begin + (index or 0) * nbytes
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < nbytes:
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, f"{self._path} ends inside {info.name}")
                done += count
        finally:
            os.close(fd)
        return raw.view(dtype).view(shape)

    def advise(self, ranges: Iterable[tuple[int, int]], advice: int) -> None:
        """Tell the kernel what is planned for byte ranges `[begin, end)` of the data section."""
        for begin, end in ranges:
            start = (self._data_start + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(advice, start, self._data_start + end - start)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, with neighbours that touch joined."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out
