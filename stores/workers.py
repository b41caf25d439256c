"""Processes that build chunks: a quantizer in numpy holds the interpreter lock too often for threads to use more cores.

Each has a few lanes, which are threads: while one quantizes, the others wait for the disk. One process is started and
given what the builder knows of the checkpoint, then forks the others, which share its memory until they write to it.
Only chunks and checksums travel; rows are written to the pack by who made them. If the builder dies, so do they.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.chunks import Chunk, Digests, Lane
from ziggurat.stores.encoder import RowEncoder
from ziggurat.stores.errors import StoreError
from ziggurat.stores.loading import ExpertLoader
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.rowfile import RowFile

#: What the first of them takes beside lanes: an interpreter with PyTorch. Measured: 240 MB.
FIRST_PROCESS_BYTES = 400 << 20
#: What each of the others takes beside its lanes, by copying what it shared. Measured: less than 50 MB with a lane.
PROCESS_BYTES = 48 << 20
#: One that quantizes, one that reads, one that writes or waits for its turn on the disk.
LANES_OF_PROCESS = 3

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ziggurat.stores.workers import main; main()"
_PR_SET_PDEATHSIG = 1

#: Device, inode, size and time of change of one of the checkpoint's files.
FileState = tuple[int, int, int, int]
_Job = tuple[Checkpoint, list[FileState], RowEncoder, list[tuple[Path, PackHeader]], type[Lane]]


def workers_of(lanes: int) -> int:
    """How many processes a build in so many lanes starts, besides the one that forks them."""
    return -(-(lanes - own_lanes(lanes)) // LANES_OF_PROCESS)


def own_lanes(lanes: int) -> int:
    """How many of them are threads of the builder itself."""
    return max(1, min(lanes - 1, LANES_OF_PROCESS))


class WorkerError(StoreError):
    """A process that builds chunks ended before its work was done."""


class WorkerProcesses:
    """So many lanes in processes; `builders` has a function for each, which has it build one chunk and waits.

    The encoder must be one that can be pickled. Functions raise what a lane raises, or WorkerError.
    """

    def __init__(
        self,
        count: int,
        checkpoint: Checkpoint,
        encoder: RowEncoder,
        files: Sequence[RowFile],
        lane: type[Lane] = Lane,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        self._connections = [Connection(pair[0].detach()) for pair in pairs]
        targets = [(file.path, file.header) for file in files]
        job: _Job = (checkpoint, _states(checkpoint), encoder, targets, lane)
        arguments = [json.dumps(sys.path), str(os.getpid()), json.dumps(theirs)]
        with open(os.memfd_create("ziggurat-pack-job"), "w+b") as written:  # a pipe blocks until it is read
            pickle.dump(job, written)
            written.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *arguments],
                stdin=written,
                pass_fds=theirs,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        for _, their in pairs:
            their.close()
        self.builders = [_Builder(connection) for connection in self._connections]

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # which is how they learn that there is nothing more to do
        self._process.wait()


class _Builder:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, chunk: Chunk) -> Digests:
        try:
            self._connection.send(chunk)
            found = self._connection.recv()
        except (EOFError, OSError) as e:
            raise WorkerError(
                "a process that encodes experts ended unexpectedly; if memory ran out, have less else running"
            ) from e
        if isinstance(found, BaseException):
            raise found
        digests: Digests = found
        return digests


def main() -> None:
    """The first process: opens files, forks, and waits."""
    _die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder decides what an interrupt means
    with sys.stdin.buffer as written:
        job: _Job = pickle.load(written)
    checkpoint, states, encoder, targets, lane = job
    if states != _states(checkpoint):
        raise SystemExit(f"{checkpoint.path}: the checkpoint changed while it was being packed")
    files = [RowFile(where, header) for where, header in targets]
    loader = ExpertLoader(checkpoint)
    descriptors: list[int] = json.loads(sys.argv[3])
    shares = [descriptors[at : at + LANES_OF_PROCESS] for at in range(0, len(descriptors), LANES_OF_PROCESS)]
    first = os.getpid()
    for share in shares:
        if os.fork() == 0:
            _die_with(first)
            for other in set(descriptors).difference(share):
                os.close(other)
            try:
                _serve_all([(Connection(one), lane(checkpoint, loader, encoder, files)) for one in share])
            finally:
                os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in shares:
        os.wait()
    os._exit(0)  # an interpreter with PyTorch takes half a second to end, for which the builder would wait


def _states(checkpoint: Checkpoint) -> list[FileState]:
    found = [os.stat(path) for path in checkpoint.shards]
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


def _serve_all(lanes: Sequence[tuple[Connection, Lane]]) -> None:
    threads = [threading.Thread(target=_serve, args=pair) for pair in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(connection: Connection, lane: Lane) -> None:
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = lane.build(chunk)
        except Exception as e:  # noqa: BLE001  # it is raised on the other side
            answer = _sendable(e)
        connection.send(answer)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # an error with arguments of its own kind
        return StoreError(f"{type(error).__name__}: {error}")
    return error


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
