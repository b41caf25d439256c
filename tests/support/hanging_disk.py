"""A disk whose reads never return, for as long as a test wants: a read-only FUSE filesystem over one folder of files.

Spoken without a library, from `linux/fuse.h`, in a process of its own: what hangs is the real kernel, by every way of
reading. Needs /dev/fuse and the right to mount.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN = struct.Struct("<IIQQIIII")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_READ = struct.Struct("<QQII")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_OP, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _ACCESS, _INTERRUPT, _DESTROY, _BATCH_FORGET = (
    26, 27, 28, 29, 34, 36, 38, 42,
)  # fmt: skip
_DETACH = 2
_REQUEST_BYTES = 1 << 20


class HangingDisk:
    """folder: where the files of the source folder can be read. At most one range hangs at a time.

    `hang` is a local disk that is dead: not even SIGKILL ends who waits. `freeze` is a server that is gone: it does.
    """

    def __init__(self, folder: Path, control: Path, pid: int) -> None:
        self.folder = folder
        self._pid = pid
        self._hang = control / "hang"
        self._held = control / "held"

    def hang(self, start: int = 0, end: int = 1 << 62) -> None:
        """From now on reads that touch these bytes of any file do not return."""
        aside = self._hang.with_suffix(".new")
        aside.write_text(f"{start} {end}", encoding="utf-8")
        aside.rename(self._hang)

    def freeze(self) -> None:
        """From now on nothing of the disk answers, and who waits can be killed."""
        os.kill(self._pid, signal.SIGSTOP)

    def answer(self) -> None:
        """All reads return, also those that hang."""
        os.kill(self._pid, signal.SIGCONT)
        self._hang.unlink(missing_ok=True)

    @property
    def held(self) -> int:
        """Reads that hang by now."""
        return int(self._held.read_text(encoding="utf-8")) if self._held.exists() else 0

    def wait_held(self, count: int = 1) -> None:
        deadline = time.monotonic() + 60
        while self.held < count:
            assert time.monotonic() < deadline, f"only {self.held} reads hang"
            time.sleep(0.01)


@contextmanager
def hanging_disk(source: Path, work: Path) -> Iterator[HangingDisk | None]:
    """The files of `source` below a folder in `work`; None where that cannot be had."""
    target, control = work / "mounted", work / "control"
    target.mkdir(parents=True)
    control.mkdir()
    command = [sys.executable, __file__, str(source), str(target), str(control)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ready = child.stdout.readline() == "ready\n"
        disk = HangingDisk(target, control, child.pid)
        try:
            if ready:
                next(iter(target.iterdir())).open("rb").close()  # the kernel learns what it need not ask
            yield disk if ready else None
        finally:
            if ready:
                disk.answer()
                ctypes.CDLL(None).umount2(os.fsencode(target), _DETACH)
            child.kill()  # ends the connection: reads that still hang fail


class _Filesystem:
    """Answers the kernel's requests, one after another."""

    def __init__(self, device: int, source: Path, control: Path) -> None:
        self._device = device
        self._source = source
        self._control = control
        self._names = {1: ""}
        self._held: list[tuple[int, bytes]] = []

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._device], [], [], 0.02)
            if ready:
                try:
                    request = os.read(self._device, _REQUEST_BYTES)
                except OSError as e:
                    if e.errno == errno.ENODEV:
                        return  # unmounted
                    if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                        continue
                    raise
                self._serve(request)
            waiting, self._held = self._held, []
            for unique, body in waiting:
                self._read(unique, body)
            if len(waiting) != len(self._held) or ready:
                self._say_held()

    def _say_held(self) -> None:
        aside = self._control / "held.new"
        aside.write_text(str(len(self._held)), encoding="utf-8")
        aside.rename(self._control / "held")

    def _serve(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        body = request[_IN.size :]
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return  # these want no answer; a disk that hangs does not mind being interrupted
        try:
            if opcode == _INIT:
                self._reply(
                    unique, struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 1, 128, 96, 4096, 1, 0, 0, 0)
                )
            elif opcode == _LOOKUP:
                self._lookup(unique, body.rstrip(b"\0").decode())
            elif opcode == _GETATTR:
                self._reply(unique, struct.pack("<QII", 3600, 0, 0) + self._attributes(node))
            elif opcode in (_OPEN, _OPENDIR):
                self._reply(unique, struct.pack("<QIi", node, 0, 0))
            elif opcode == _READ_OP:
                self._read(unique, body)
            elif opcode == _READDIR:
                self._list(unique, body)
            elif opcode == _STATFS:
                self._reply(unique, struct.pack("<QQQQQIIII24x", 1 << 20, 0, 0, 100, 0, 4096, 255, 4096, 0))
            elif opcode in (_RELEASE, _RELEASEDIR, _ACCESS, _DESTROY):
                self._reply(unique)
            else:  # the kernel does not ask again; so closing a file, and asking whether it is ready, wait for nothing
                self._reply(unique, error=errno.ENOSYS)
        except OSError as e:
            self._reply(unique, error=e.errno or errno.EIO)

    def _reply(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        try:
            os.write(self._device, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)
        except OSError as e:
            if e.errno != errno.ENOENT:  # who asked is gone
                raise

    def _lookup(self, unique: int, name: str) -> None:
        os.stat(self._source / name)
        node = next((number for number, known in self._names.items() if known == name), len(self._names) + 1)
        self._names[node] = name
        self._reply(unique, struct.pack("<QQQQII", node, 0, 3600, 3600, 0, 0) + self._attributes(node))

    def _attributes(self, node: int) -> bytes:
        found = os.stat(self._source / self._names[node])
        return _ATTRIBUTES.pack(
            node, found.st_size, found.st_blocks, int(found.st_atime), int(found.st_mtime), int(found.st_ctime),
            0, 0, 0, found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _read(self, unique: int, body: bytes) -> None:
        node, offset, size, _ = _READ.unpack_from(body)
        try:
            start, end = map(int, (self._control / "hang").read_text(encoding="utf-8").split())
        except FileNotFoundError:
            start = end = 0
        if offset < end and start < offset + size:
            self._held.append((unique, body))
            return
        with (self._source / self._names[node]).open("rb") as file:
            self._reply(unique, os.pread(file.fileno(), size, offset))

    def _list(self, unique: int, body: bytes) -> None:
        _, offset, size, _ = _READ.unpack_from(body)
        out = b""
        for place, name in enumerate(sorted(os.listdir(self._source)), 1):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", place + 1, place, len(raw), 8) + raw
            entry += bytes(-len(entry) % 8)
            if place > offset and len(out) + len(entry) <= size:
                out += entry
        self._reply(unique, out)


def _main(source: str, target: str, control: str) -> None:
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        print("no", flush=True)
        return
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other,max_read=1048576"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"ziggurat-hanging", os.fsencode(target), b"fuse", 0, options.encode()) != 0:
        print("no", flush=True)
        return
    print("ready", flush=True)
    _Filesystem(device, Path(source), Path(control)).run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
