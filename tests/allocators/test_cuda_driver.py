"""The driver's calls, made through real C function pointers of a driver that works on host memory."""

from __future__ import annotations

import ctypes
import pickle
import struct
import threading

import numpy as np
import pytest

from support.cuda_fakes import FakeLibrary, fake_driver
from ziggurat.allocators.cuda_driver import CudaDriver
from ziggurat.allocators.errors import CudaError


def test_a_thread_without_a_context_gets_the_devices_and_one_that_has_one_keeps_it() -> None:
    driver, library = fake_driver()
    driver.use(1)
    driver.use(0)
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1

    def elsewhere() -> None:
        driver.use(1)
        driver.register(1 << 30, 4096)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert library.registered == {1 << 30: 4096}
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert library.calls.count("cuCtxSetCurrent") == 2


def test_registration_and_its_device_pointer() -> None:
    driver, library = fake_driver()
    library.window = 1 << 45
    driver.use(0)
    driver.register((1 << 46) + 4096, 1 << 33)
    assert library.registered == {(1 << 46) + 4096: 1 << 33}
    assert driver.device_pointer((1 << 46) + 4096) == (1 << 46) + 4096 + (1 << 45)
    driver.unregister((1 << 46) + 4096)
    assert library.registered == {}


def test_where_a_device_is() -> None:
    assert fake_driver()[0].pci_bus_id(3) == "0000:1d:00.0"


def test_copies_one_by_one_and_in_a_batch() -> None:
    driver, library = fake_driver()
    source = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    target = np.zeros(4096, dtype=np.uint8)
    driver.copy(target.ctypes.data + 100, source.ctypes.data, 50, 0)
    assert np.array_equal(target[100:150], source[:50])
    to, start, size = (np.array(one, dtype=np.uint64) for one in ([1000, 3000], [10, 2000], [7, 900]))
    driver.copy_batch(to + np.uint64(target.ctypes.data), start + np.uint64(source.ctypes.data), size, 0x57)
    assert np.array_equal(target[1000:1007], source[10:17])
    assert np.array_equal(target[3000:3900], source[2000:2900])
    assert library.batches[0][3] == 0x57
    # CUmemcpyAttributes: source access in stream order (1), two unused hints, prefer overlap with compute (1)
    assert struct.unpack("<iiiiiI", library.attributes[0]) == (1, 0, 0, 0, 0, 1)
    driver.copy_batch(
        to + np.uint64(target.ctypes.data), start + np.uint64(source.ctypes.data), size, 1, overlap=False
    )
    assert struct.unpack("<iiiiiI", library.attributes[1]) == (1, 0, 0, 0, 0, 0)


def test_a_batch_is_not_for_the_default_stream() -> None:
    driver, library = fake_driver()
    one = np.ones(1, dtype=np.uint64)
    with pytest.raises(CudaError, match="default stream"):
        driver.copy_batch(one, one, one, 0)
    assert "cuMemcpyBatchAsync" not in library.calls


def test_errors_carry_the_drivers_words() -> None:
    driver, library = fake_driver()
    library.refuse["cuMemHostRegister"] = 2
    driver.use(0)
    with pytest.raises(CudaError, match=r"cuMemHostRegister: CUDA_ERROR_2 \(error 2\)") as caught:
        driver.register(1 << 30, 4096)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.code, str(copy)) == (2, str(caught.value))


def test_a_driver_that_is_too_old_is_named() -> None:
    library = FakeLibrary()
    library.missing = {"cuMemcpyBatchAsync"}
    driver = CudaDriver(library)
    one = np.ones(1, dtype=np.uint64)
    with pytest.raises(CudaError, match=r"cuMemcpyBatchAsync.*driver 580"):
        driver.copy_batch(one, one, one, 1)
    here, there = (ctypes.create_string_buffer(8) for _ in range(2))
    driver.copy(ctypes.addressof(here), ctypes.addressof(there), 8, 0)


def test_a_driver_without_a_device() -> None:
    library = FakeLibrary()
    library.refuse["cuInit"] = 100
    with pytest.raises(CudaError, match="cuInit: CUDA_ERROR_100"):
        CudaDriver(library)
