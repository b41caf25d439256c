"""The arena of a plan, and whether locked memory counts."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from support.cuda_fakes import FakeLocker
from ziggurat.allocators import memlock_trial
from ziggurat.allocators.errors import PageLockError
from ziggurat.allocators.opening import open_arena


def test_kinds_and_their_memory() -> None:
    pageable = open_arena("pageable", 4, 4096)
    assert (pageable.kind, pageable.device_pointer) == ("pageable", None)
    locker = FakeLocker()
    told: list[int] = []
    pinned = open_arena("pinned", 4, 4096, locker=locker, progress=lambda ready, whole: told.append(ready))
    assert (pinned.kind, pinned.device_pointer) == ("pinned", pinned.tensor.data_ptr())
    assert told[-1] == 4 * 4096
    pinned.close()
    pageable.close()


def test_pages_that_cannot_be_locked(caplog: pytest.LogCaptureFixture) -> None:
    locker = FakeLocker()
    locker.fail_from = 0
    with pytest.raises(PageLockError):
        open_arena("pinned", 4, 4096, locker=locker)
    with caplog.at_level(logging.WARNING):
        arena = open_arena("pinned", 4, 4096, locker=locker, pageable_instead=True)
    assert (arena.kind, arena.places) == ("pageable", 4)
    assert "the arena is pageable" in caplog.text
    assert "the fake's limit" in caplog.text


def run(code: str) -> str:
    code = "import ctypes, resource\nfrom ziggurat.allocators import memlock_trial as trial\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


DRIVER = """
class Driver:
    def use(self, device): pass
    def register(self, address, nbytes): ...
    def unregister(self, address): print("unregistered")
driver = Driver()
trial.cuda_driver = lambda: driver
"""
MLOCKS = """
from ziggurat.allocators.errors import CudaError
def register(address, nbytes):
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
        raise CudaError("cuMemHostRegister", 2, "out of memory")
driver.register = register
"""


def test_a_driver_that_takes_pages_as_the_kernels_own_counts_nothing() -> None:
    assert run(DRIVER + "print(trial._try())") == f"unregistered\n{memlock_trial._FREE}"


def test_a_driver_that_locks_as_mlock_does_counts() -> None:
    assert run(DRIVER + MLOCKS + "print(trial._try())") == str(memlock_trial._COUNTS)


def test_without_a_driver_nothing_is_known() -> None:
    code = (
        "from ziggurat.allocators.errors import CudaError\n"
        "def none(): raise CudaError('libcuda.so.1', None, 'no CUDA driver')\n"
        "trial.cuda_driver = none\nprint(trial._try())"
    )
    assert run(code) == str(memlock_trial._UNKNOWN)


@pytest.mark.parametrize(
    ("output", "code", "counts"),
    [
        (b"tried\n", memlock_trial._COUNTS, True),
        (b"tried\n", memlock_trial._FREE, False),
        (b"tried\n", memlock_trial._UNKNOWN, None),
        (b"", 0, None),
        (b"tried\n", -11, None),
    ],
)
def test_what_the_trials_process_says(
    output: bytes, code: int, counts: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: subprocess.CompletedProcess[bytes] = subprocess.CompletedProcess([], code, output)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert memlock_trial.registration_counts.__wrapped__() is counts


def test_a_trial_that_does_not_end_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("trial", 60)

    monkeypatch.setattr(subprocess, "run", run)
    assert memlock_trial.registration_counts.__wrapped__() is None
