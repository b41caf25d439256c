"""Child processes of the end-to-end tests: a group each, always ended, by pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ziggurat.residency.config import TiersConfig

SCRIPT = Path(__file__).with_name("engine_script.py")


class Child:
    """A process in a session of its own, whose output is collected by a thread."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self.lines.append(line)
                self._arrived.notify_all()
        with self._arrived:
            self._arrived.notify_all()

    def phase(self, name: str, timeout: float) -> dict[str, Any] | None:
        """The report of a phase of ``engine_script``; None if the process ended or the time ran out before."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while True:
                for line in self.lines:
                    marker, _, payload = line.partition("phase ")
                    if not marker and payload:
                        report: dict[str, Any] = json.loads(payload)
                        if report["name"] == name:
                            return report
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    return None
                self._arrived.wait(min(left, 1.0))

    def tail(self) -> str:
        return "".join(self.lines[-40:])

    def end(self) -> None:
        """Stop the process and every process it started, also those that no longer listen to SIGTERM."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            if self.process.poll() is None:
                os.kill(self.process.pid, number)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        for orphan in family:
            try:
                orphan.kill()
            except psutil.NoSuchProcess:
                continue
        self._reader.join(10.0)


@contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[Child]:
    child = Child(command, env)
    try:
        yield child
    finally:
        child.end()


def make_job(
    model: Path,
    tiers: TiersConfig,
    capture: Path,
    phases: list[dict[str, Any]],
    engine: dict[str, Any] | None = None,
    **debug: Any,
) -> dict[str, Any]:
    """A job for ``engine_script``; logits of every rank go to ``capture``."""
    return {
        "model": str(model),
        "config": tiers.model_dump(mode="json"),
        "debug": {"capture_logits": str(capture), **debug},
        "engine": engine or {},
        "phases": phases,
    }


@contextmanager
def engine_process(job: dict[str, Any], folder: Path) -> Iterator[Child]:
    """``engine_script`` on a job, in the environment of the offline engines."""
    from ziggurat.integration.determinism.environment import offline_environment

    path = folder / f"job-{len(list(folder.glob('job-*.json')))}.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    env = offline_environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")]))
    with running([sys.executable, str(SCRIPT), str(path)], env) as child:
        yield child
