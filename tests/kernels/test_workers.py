"""Tasks end before their caller goes on, and the same error is raised whatever the threads' timing."""

from __future__ import annotations

import multiprocessing
import threading

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
    running, go, returned = threading.Event(), threading.Event(), threading.Event()
    errors: list[str] = []

    def fail() -> None:
        raise ValueError("first")

    def last_one() -> None:
        running.set()
        go.wait(60)

    def caller() -> None:
        try:
            run_all([fail, last_one])
        except ValueError as error:
            errors.append(str(error))
        returned.set()

    thread = threading.Thread(target=caller)
    thread.start()
    assert running.wait(60)
    assert not returned.wait(0.2)  # it must not return before `go`, however long that takes
    go.set()
    thread.join(60)
    assert errors == ["first"]


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
