"""Metric buffers in shared memory: one small file per rank, written by the worker, read at scrape time.

The API server's `/metrics` lives in another process than the tiers. A file name carries the engine's instance, the
rank and the writer's pid; files of dead writers are swept when a new one is made.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from pathlib import Path

import psutil

from ziggurat.residency.metrics import BUFFER_BYTES, Sample, read_samples
from ziggurat.residency.runtime_errors import MetricsBufferError

_NAME = re.compile(r"ziggurat\.(?P<instance>[^.]+)\.(?P<rank>\d+)\.(?P<pid>\d+)\.metrics")


def shared_folder() -> Path:
    """Where the files lie: shared memory where the system has it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class SharedBuffer:
    """A writable buffer that other processes of this user can find by instance and rank."""

    def __init__(self, instance: str, rank: int, folder: Path | None = None) -> None:
        folder = folder or shared_folder()
        sweep(folder)
        self.path = folder / f"ziggurat.{_safe(instance)}.{rank}.{os.getpid()}.metrics"
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, BUFFER_BYTES)
            self._map = mmap.mmap(descriptor, BUFFER_BYTES)
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Remove the file. The mapping itself lives as long as something still refers to it."""
        self.path.unlink(missing_ok=True)


def _safe(instance: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", instance)


def sweep(folder: Path) -> None:
    """Remove the files of processes that no longer run."""
    for path in folder.glob("ziggurat.*.metrics"):
        match = _NAME.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match["pid"])):
            path.unlink(missing_ok=True)


def read_instance(instance: str, folder: Path | None = None) -> dict[int, list[Sample]]:
    """Rank -> samples of one engine. A file that is just being made or removed is left out."""
    ranks: dict[int, list[Sample]] = {}
    for path in sorted((folder or shared_folder()).glob(f"ziggurat.{_safe(instance)}.*.metrics")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                view = memoryview(mapped)
                try:
                    ranks[int(match["rank"])] = read_samples(view)
                finally:
                    view.release()
        except (FileNotFoundError, ValueError, MetricsBufferError):
            continue
    return ranks
