"""Tasks end before their caller goes on, and the same error is raised whatever the threads' timing."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

from ziggurat.kernels.codecs import workers
from ziggurat.kernels.codecs.workers import available_cores, run_all


@pytest.fixture(params=[1, 2])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(workers, "available_cores", lambda: request.param)
    monkeypatch.setattr(workers, "_executors", {})
    return int(request.param)


def test_results_come_in_order(cores: int) -> None:
    assert run_all([lambda i=i: i * i for i in range(20)]) == [i * i for i in range(20)]  # type: ignore[misc]
    assert run_all([]) == []
    assert available_cores() >= 1


def test_every_task_has_ended_when_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "available_cores", lambda: 2)
    monkeypatch.setattr(workers, "_executors", {})
    failed = threading.Event()
    done: list[int] = []

    def fail() -> None:
        failed.set()
        raise ValueError("first")

    def finish_late() -> None:
        failed.wait(30)
        np.zeros(1 << 22).sum()
        done.append(1)

    with pytest.raises(ValueError, match="first"):
        run_all([finish_late, fail, finish_late])
    assert len(done) == 2


def test_the_first_error_in_order_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "available_cores", lambda: 2)
    monkeypatch.setattr(workers, "_executors", {})
    later = threading.Event()

    def first() -> None:
        later.wait(30)
        raise ValueError("first")

    def second() -> None:
        later.set()
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        run_all([first, second])


def in_child(queue: multiprocessing.Queue[int]) -> None:
    queue.put(sum(run_all([lambda: 1, lambda: 2, lambda: 3])))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "available_cores", lambda: 2)
    monkeypatch.setattr(workers, "_executors", {})
    run_all([lambda: 1, lambda: 2])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == 6
    finally:
        child.join(60)
    assert child.exitcode == 0
