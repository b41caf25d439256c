"""The kernel's io_uring by its system calls, without a library: enough of it to read files.

Written here because the bindings in the package index need a compiler or lag behind the kernel, and reading needs three
system calls and two shared rings. The layout is that of `linux/io_uring.h`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

# The same numbers on every architecture.
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_OFF_SQ_RING, _OFF_SQES = 0, 0x10000000
_FEATURES = 0b111  # one mapping for both rings, completions never dropped, arguments stable after submission
_COOP_TASKRUN = 1 << 8  # 5.19: no interrupt to the submitting thread at each completion
_ENTER_GETEVENTS = 1
_REGISTER_BUFFERS, _REGISTER_FILES = 0, 2
_SQE = struct.Struct("<BBHiQQIIQHHiQQ")
_CQE = struct.Struct("<QiI")
_PARAMS_BYTES = 120
_MAX_FIXED_BYTES = 1 << 30  # of one registered buffer

NOP, READV, READ_FIXED, POLL_ADD, ASYNC_CANCEL, READ = 0, 1, 4, 6, 14, 22
FIXED_FILE, ASYNC = 1, 1 << 4  # flags of an entry

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Completion(NamedTuple):
    """user_data: the entry's own. result: bytes, or a negative error number."""

    user_data: int
    result: int


class Ring:
    """One submission and one completion ring. Not safe for concurrent use; any one thread at a time may use it.

    The caller keeps at most `entries` entries under way and every buffer alive until its entry completed.
    Raises OSError where the kernel has no io_uring or forbids it.
    """

    def __init__(self, entries: int) -> None:
        params = bytearray(_PARAMS_BYTES)
        self._fd = self._setup(entries, params)
        try:
            sq_entries, cq_entries = struct.unpack_from("<II", params, 0)
            (features,) = struct.unpack_from("<I", params, 20)
            if features & _FEATURES != _FEATURES:
                raise OSError(errno.ENOSYS, "this kernel's io_uring is too old (5.6 is needed)")
            sq = struct.unpack_from("<7I", params, 40)  # head, tail, mask, entries, flags, dropped, array
            cq = struct.unpack_from("<6I", params, 80)  # head, tail, mask, entries, overflow, cqes
            size = max(sq[6] + 4 * sq_entries, cq[5] + _CQE.size * cq_entries)
            self._rings = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, offset=_OFF_SQ_RING)
            self._sqes = mmap.mmap(self._fd, _SQE.size * sq_entries, flags=mmap.MAP_SHARED, offset=_OFF_SQES)
        except BaseException:
            os.close(self._fd)
            raise
        self.entries: int = sq_entries
        self._sq_mask, self._cq_mask, self._cqes = sq_entries - 1, cq_entries - 1, cq[5]
        self._sq_head = ctypes.c_uint32.from_buffer(self._rings, sq[0])
        self._sq_tail = ctypes.c_uint32.from_buffer(self._rings, sq[1])
        self._cq_head = ctypes.c_uint32.from_buffer(self._rings, cq[0])
        self._cq_tail = ctypes.c_uint32.from_buffer(self._rings, cq[1])
        for i in range(sq_entries):  # entries stand in the order of their slots
            struct.pack_into("<I", self._rings, sq[6] + 4 * i, i)
        self._tail = 0
        self._fence = Lock()
        self._fixed: list[tuple[int, int]] = []  # start and end of each registered buffer
        self.fixed_files = False

    @staticmethod
    def _setup(entries: int, params: bytearray) -> int:
        for flags in (_COOP_TASKRUN, 0):
            params[:] = bytes(_PARAMS_BYTES)
            struct.pack_into("<I", params, 8, flags)
            raw = (ctypes.c_char * _PARAMS_BYTES).from_buffer(params)
            fd = int(_syscall(_SETUP, ctypes.c_uint(entries), raw))
            del raw
            if fd >= 0:
                os.set_inheritable(fd, False)
                return fd
            if ctypes.get_errno() != errno.EINVAL:
                break
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

    def register_files(self, fds: Sequence[int]) -> bool:
        """Let entries name these files by position (flag FIXED_FILE); False if the kernel does not want to."""
        numbers = (ctypes.c_int32 * len(fds))(*fds)
        done = _syscall(_REGISTER, self._fd, ctypes.c_uint(_REGISTER_FILES), numbers, ctypes.c_uint(len(fds)))
        self.fixed_files = done == 0
        return self.fixed_files

    def register_memory(self, address: int, nbytes: int) -> bool:
        """Pin memory once instead of at each read into it. False, without harm, where a limit is in the way."""
        pieces = [
            (at, min(_MAX_FIXED_BYTES, address + nbytes - at))
            for at in range(address, address + nbytes, _MAX_FIXED_BYTES)
        ]
        vectors = (ctypes.c_uint64 * (2 * len(pieces)))(*(number for piece in pieces for number in piece))
        done = _syscall(
            _REGISTER, self._fd, ctypes.c_uint(_REGISTER_BUFFERS), vectors, ctypes.c_uint(len(pieces))
        )
        if done == 0:
            self._fixed = [(at, at + length) for at, length in pieces]
        return bool(done == 0)

    def fixed_at(self, address: int, nbytes: int) -> int | None:
        """Which registered buffer holds this memory whole."""
        if not self._fixed:
            return None
        index = (address - self._fixed[0][0]) // _MAX_FIXED_BYTES
        if 0 <= index < len(self._fixed) and address + nbytes <= self._fixed[index][1]:
            return int(index)
        return None

    @property
    def pushed(self) -> int:
        """Entries added so far, modulo 2^32."""
        return self._tail

    def push(
        self,
        opcode: int,
        user_data: int,
        *,
        fd: int = -1,
        address: int = 0,
        length: int = 0,
        offset: int = 0,
        flags: int = 0,
        operation_flags: int = 0,
        buffer: int = 0,
    ) -> None:
        """Add an entry; the kernel sees it at the next `enter`."""
        at = (self._tail & self._sq_mask) * _SQE.size
        _SQE.pack_into(
            self._sqes, at, opcode, flags, 0, fd, offset, address, length, operation_flags, user_data,
            buffer, 0, 0, 0, 0,
        )  # fmt: skip
        self._tail = (self._tail + 1) & 0xFFFFFFFF

    def enter(self, wait: bool) -> None:
        """Submit what was pushed; `wait` until at least one completion is there (or a signal came).

        The lock of the interpreter is free meanwhile. Raises OSError if the ring is broken.
        """
        self._sq_tail.value = self._tail  # the system call is the barrier
        # What is left is asked of the kernel each time: a count of our own would be wrong once a signal's exception
        # came between the call and its booking, and then never reach zero.
        while (pushed := (self._tail - self._sq_head.value) & 0xFFFFFFFF) or wait:
            flags = _ENTER_GETEVENTS if wait else 0
            numbers = (ctypes.c_uint(pushed), ctypes.c_uint(wait), ctypes.c_uint(flags))
            done = int(_syscall(_ENTER, self._fd, *numbers, None, ctypes.c_size_t(0)))
            if done >= pushed:
                return
            if done >= 0:
                continue
            number = ctypes.get_errno()
            if number == errno.EINTR:
                return  # Python's signal handlers run in the caller, which comes again
            if number in (errno.EAGAIN, errno.EBUSY):
                if self._ready():
                    return  # the caller makes room by reaping
                continue
            raise OSError(number, os.strerror(number))

    def reap(self) -> list[Completion]:
        """Take the completions that are there."""
        head, tail = self._cq_head.value, self._cq_tail.value
        if head == tail:
            return []
        with self._fence:  # what the kernel wrote before the tail is read after it, on any processor
            pass
        found = []
        while head != tail:
            user_data, result, _ = _CQE.unpack_from(
                self._rings, self._cqes + (head & self._cq_mask) * _CQE.size
            )
            found.append(Completion(user_data, result))
            head = (head + 1) & 0xFFFFFFFF
        self._cq_head.value = head
        return found

    def close(self) -> None:
        """Nothing may be under way. The mappings go with the object."""
        os.close(self._fd)
        self._fd = -1
        del self._sq_head, self._sq_tail, self._cq_head, self._cq_tail
        self._rings.close()
        self._sqes.close()

    def _ready(self) -> bool:
        return bool(self._cq_head.value != self._cq_tail.value)


def problem() -> str | None:
    """Why io_uring cannot be used here, in words; None if it can. Tries it."""
    try:
        ring = Ring(2)
    except OSError as e:
        return _in_words(e)
    try:
        page = bytearray(1)
        zero = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
        try:
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            ring.push(READ, 1, fd=zero, address=address, length=1)
            found: list[Completion] = []
            while not found:
                ring.enter(True)
                found = ring.reap()
        finally:
            os.close(zero)
        if found[0].result != 1:
            return f"the kernel's io_uring does not read files ({os.strerror(-found[0].result)})"
        return None
    except OSError as e:
        return _in_words(e)
    finally:
        ring.close()


def _in_words(error: OSError) -> str:
    if error.errno == errno.ENOSYS:
        return "this kernel has no io_uring, or one that is too old, or a sandbox hides it (seccomp)"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "io_uring is forbidden here (kernel.io_uring_disabled, or the container's seccomp profile)"
    if error.errno == errno.ENOMEM:
        return "io_uring's rings do not fit the locked-memory limit (ulimit -l)"
    return f"io_uring cannot be set up: {error.strerror}"
