"""A CUDA driver, a copy stream and a page locker in host memory, for what can be proven without a GPU."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ziggurat.allocators.cuda_driver import CudaDriver
from ziggurat.allocators.lockers import LockRefusedError

INVALID_VALUE = 1
INVALID_CONTEXT = 201
NOT_FOUND = 500
OUT_OF_MEMORY = 2

_SIZE, _INT, _UINT, _PTR = ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p


class FakeLibrary:
    """libcuda as C functions over host memory: registrations are kept, copies are done at once.

    refuse: entry points that return an error. window: added to a host address to get the device's.
    context: threads that have a context; a registration in another thread fails as it does in the driver.
    batch_limit: longest copy that a batch takes.
    """

    def __init__(self) -> None:
        self.refuse: dict[str, int] = {}
        self.missing: set[str] = set()
        self.window = 0
        self.registered: dict[int, int] = {}
        self.flags: list[int] = []
        self.calls: list[str] = []
        self.batches: list[tuple[list[int], list[int], list[int], int]] = []
        self.attributes: list[bytes] = []
        self.batch_limit = 1 << 62
        self._local = threading.local()
        self._kept: list[Any] = []

    def cuGetProcAddress_v2(self, name: bytes, address: Any, version: Any, flags: Any, status: Any) -> int:  # noqa: N802
        text = name.decode()
        assert (version.value, flags.value) == (13000, 0)
        if text in self.missing:
            return NOT_FOUND
        function, types = self._functions()[text]

        def counted(*arguments: Any) -> int:
            self.calls.append(text)
            if text in self.refuse:
                return self.refuse[text]
            result = function(*arguments)
            return 0 if result is None else int(result)

        pointer = ctypes.CFUNCTYPE(_INT, *types)(counted)
        self._kept.append(pointer)
        address._obj.value = ctypes.cast(pointer, _PTR).value
        return 0

    def _functions(self) -> dict[str, tuple[Callable[..., int | None], tuple[Any, ...]]]:
        # Addresses as plain numbers: what a pointer to a pointer points to is written to with ctypes.
        return {
            "cuInit": (lambda flags: None, (_UINT,)),
            "cuGetErrorName": (self._error_name, (_INT, _PTR)),
            "cuGetErrorString": (lambda code, to: NOT_FOUND, (_INT, _PTR)),
            "cuDeviceGet": (lambda to, number: _put(to, _INT, number), (_PTR, _INT)),
            "cuDeviceGetPCIBusId": (self._bus, (_PTR, _INT, _INT)),
            "cuDevicePrimaryCtxRetain": (lambda to, device: _put(to, _PTR, 0xC0 + device), (_PTR, _INT)),
            "cuCtxGetCurrent": (lambda to: _put(to, _PTR, getattr(self._local, "context", None)), (_PTR,)),
            "cuCtxSetCurrent": (lambda context: setattr(self._local, "context", context), (_PTR,)),
            "cuMemHostRegister": (self._register, (_PTR, _SIZE, _UINT)),
            "cuMemHostUnregister": (self._unregister, (_PTR,)),
            "cuMemHostGetDevicePointer": (self._device_pointer, (_PTR, _PTR, _UINT)),
            "cuMemcpyHtoDAsync": (self._copy, (_PTR, _PTR, _SIZE, _PTR)),
            "cuMemcpyBatchAsync": (self._copy_batch, (_PTR, _PTR, _PTR, _SIZE, _PTR, _PTR, _SIZE, _PTR)),
        }

    def _error_name(self, code: int, to: int) -> None:
        name = ctypes.create_string_buffer(f"CUDA_ERROR_{code}".encode())
        self._kept.append(name)
        _put(to, _PTR, ctypes.addressof(name))

    def _bus(self, to: int, length: int, device: int) -> None:
        text = f"0000:{0x1A + device:02X}:00.0".encode() + b"\0"
        assert len(text) <= length
        ctypes.memmove(to, text, len(text))

    def _has_context(self) -> bool:
        return getattr(self._local, "context", None) is not None

    def _register(self, address: int, nbytes: int, flags: int) -> int | None:
        if not self._has_context():
            return INVALID_CONTEXT
        if any(
            address < start + size and start < address + nbytes for start, size in self.registered.items()
        ):
            return 712  # already registered
        self.flags.append(flags)
        self.registered[address] = nbytes
        return None

    def _unregister(self, address: int) -> int | None:
        if not self._has_context():
            return INVALID_CONTEXT
        return None if self.registered.pop(address, None) else 713

    def _device_pointer(self, to: int, address: int, flags: int) -> None:
        assert flags == 0
        _put(to, ctypes.c_ulonglong, address + self.window)

    def _copy(self, dst: int, src: int, nbytes: int, stream: int | None) -> None:
        ctypes.memmove(dst, src, nbytes)

    def _copy_batch(
        self,
        dst: int,
        src: int,
        size: int,
        count: int,
        attributes: int,
        first: int,
        sets: int,
        stream: int | None,
    ) -> int | None:
        to, start, sizes = (
            [int(one) for one in (ctypes.c_uint64 * count).from_address(at)] for at in (dst, src, size)
        )
        assert (sets, _SIZE.from_address(first).value) == (1, 0)
        assert stream
        if max(sizes) > self.batch_limit:
            return INVALID_VALUE
        self.attributes.append(ctypes.string_at(attributes, 24))
        self.batches.append((to, start, sizes, stream))
        for one, other, nbytes in zip(to, start, sizes, strict=True):
            ctypes.memmove(one, other, nbytes)
        return None


def _put(to: int, kind: Any, value: Any) -> None:
    kind.from_address(to).value = value


def fake_driver(library: FakeLibrary | None = None) -> tuple[CudaDriver, FakeLibrary]:
    library = FakeLibrary() if library is None else library
    return CudaDriver(library), library


class FakeLocker:
    """A PageLocker that keeps books. view: the device's address of a host address, None for no view at all."""

    def __init__(self, view: Callable[[int], int | None] = lambda address: address) -> None:
        self.view = view
        self.locked: dict[int, int] = {}
        self.history: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.fail_from: int | None = None
        self._guard = threading.Lock()

    def lock(self, address: int, nbytes: int) -> int | None:
        with self._guard:
            if self.fail_from is not None and len(self.history) >= self.fail_from:
                raise LockRefusedError("the fake's limit", "raise it")
            assert address not in self.locked
            self.locked[address] = nbytes
            self.history.append((address, nbytes))
            self.threads.add(threading.get_ident())
        return self.view(address)

    def unlock(self, address: int, nbytes: int) -> None:
        with self._guard:
            assert self.locked.pop(address) == nbytes


class FakeLane:
    """A CopyLane on which nothing happens until somebody waits: a pool's reader that forgets to wait sees old bytes."""

    handle = 0x57

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.followed = 0

    def follow_current(self) -> None:
        self.followed += 1

    def mark(self) -> FakeMark:
        return FakeMark(self, len(self.work))


class FakeMark:
    def __init__(self, lane: FakeLane, position: int) -> None:
        self.lane, self.position = lane, position

    def passed(self) -> bool:
        return self.lane.done >= self.position

    def hold_current(self) -> None:
        while self.lane.done < self.position:
            self.lane.work[self.lane.done]()
            self.lane.done += 1

    def wait(self) -> None:
        self.hold_current()


class FakeMover:
    """A RowMover that puts copies on a FakeLane; eager=True reads the rows at once, as pageable copies do."""

    def __init__(self, lane: FakeLane, *, eager: bool = False) -> None:
        self.lane, self.eager = lane, eager
        self.moved: list[tuple[list[int], list[int], list[int]]] = []

    def move(self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: int) -> None:
        assert stream == self.lane.handle
        self.moved.append((list(dst), list(src), list(nbytes)))
        for to, start, size in zip(dst, src, nbytes, strict=True):
            data = ctypes.string_at(start, size) if self.eager else None
            self.lane.work.append(functools.partial(_land, to, start, size, data))


def _land(to: int, start: int, size: int, data: bytes | None) -> None:
    ctypes.memmove(to, start if data is None else data, size)
