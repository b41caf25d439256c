"""Threads for packing. The work is numpy on arrays of many KiB, which runs without the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

_executors: dict[int, ThreadPoolExecutor] = {}


def _executor() -> ThreadPoolExecutor:
    """One pool a process; a forked child has none of its parent's threads and makes its own."""
    pid = os.getpid()
    executor = _executors.get(pid)
    if executor is None:
        executor = ThreadPoolExecutor(available_cores(), thread_name_prefix="ziggurat-pack")
        _executors.clear()
        _executors[pid] = executor
    return executor


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks on the packing threads; results in order.

    Every task has ended when this returns or raises, so none still writes to a caller's buffer. The error raised is
    that of the first failed task in order, whatever the threads' timing.
    """
    if len(tasks) == 1 or available_cores() == 1:
        return [task() for task in tasks]
    futures = [_executor().submit(task) for task in tasks]
    wait(futures)
    return [future.result() for future in futures]
