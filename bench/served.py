"""A vLLM server as a child process: started on 127.0.0.1, waited for, and always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

HOST = "127.0.0.1"
_POLL_SECONDS = 0.25
_PATIENCE_SECONDS = 20.0


class ServerError(Exception):
    """The server did not start, ended early, or answered with an error; the message holds its log's tail."""


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Server:
    """The command runs in a session, hence a process group, of its own, which is ended with it.

    command: must make the server listen on ``port``. log: file that receives what it prints.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path) -> None:
        self.port = port
        self.log = log
        self._started = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float, tell: Callable[[float], None]) -> float:
        """Seconds from start until /health answers. ``tell`` is called with the seconds waited so far."""
        while True:
            waited = time.monotonic() - self._started
            if self._process.poll() is not None:
                raise self.error(
                    f"the server ended with status {self._process.returncode} before it was ready"
                )
            if waited > timeout:
                raise self.error(f"the server was not ready within {timeout:.0f} s")
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return time.monotonic() - self._started
            except (OSError, urllib.error.URLError):
                tell(waited)
                time.sleep(_POLL_SECONDS)

    def error(self, what: str) -> ServerError:
        """An error with the last lines of the log."""
        return ServerError(f"{what}; the end of its log:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End the whole group: SIGTERM, some patience, SIGKILL. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _PATIENCE_SECONDS
            if _members(self._process.pid):
                _signal_group(self._process.pid, number)
            while _members(self._process.pid) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 5)
        self._process.wait(_PATIENCE_SECONDS)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _members(group: int) -> list[int]:
    """Processes of a group that still run. Dead ones that nobody has reaped do not count."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
