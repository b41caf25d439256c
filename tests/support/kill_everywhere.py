"""Work on files, killed at its first, second, third … system call, each time in a new folder, and then done again.

Scripts of tests use this in a process without threads of its own, since it forks: torch is imported once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
CHANGES = ("pwrite", "fdatasync", "fsync", "ftruncate", "rename", "unlink")
"""Calls that change a file."""


def run_script(script: str, *arguments: Path) -> int:
    """Run a script that prints how often it killed; tests' `support` can be imported there. Its number."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def kill_everywhere(
    work: Callable[[Path], object],
    out: Path,
    calls: Sequence[str] = CHANGES,
    killed: Callable[[Path], object] = lambda folder: None,
) -> int:
    """`work` in a folder of `out` after another, killed at one call of `os` later each time, until none kills it.

    killed: looks at what was left, before the work is done again in the same folder. How often it was killed.
    """
    kills = 0
    while True:
        folder = out / f"{kills + 1:03d}"
        code = _forked(work, folder, calls, kills + 1)
        if code == 0:
            return kills
        assert code == -signal.SIGKILL, code
        kills += 1
        killed(folder)
        code = _forked(work, folder, calls, 0)
        assert code == 0, (kills, code)


def _forked(work: Callable[[Path], object], folder: Path, calls: Sequence[str], kill_at: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _count(calls, kill_at)
            work(folder)
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _count(names: Sequence[str], kill_at: int) -> None:
    """This process is killed when it is about to make its `kill_at`th call of these."""
    lock, made = threading.Lock(), 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            with lock:
                made += 1
                if made == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, counted(getattr(os, name)))
