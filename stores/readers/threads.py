"""Threads that a read which never returns cannot keep a process alive with."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread


class DaemonThreads:
    """A pool of `count` threads, started as work comes in. Unlike an executor's, nobody joins them at exit."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Have a thread run this, which raises nothing. RuntimeError once the pool is closed."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads were told to end")
            self._work.put(task)
            if len(self._threads) < self._count:
                thread = Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self, timeout: float) -> bool:
        """Have them end after the work that is there; whether all did, within about so many seconds. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._work.put(None)
        for thread in self._threads:
            thread.join(timeout)
            timeout = timeout if not thread.is_alive() else 0.0
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            task()
            del task  # what it holds goes when it is done, not when the next one comes
