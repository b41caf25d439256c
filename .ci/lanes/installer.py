"""Run pip quietly: progress on one line, everything it says in a log, its last words in the error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


class SetupError(RuntimeError):
    """The set-up cannot go on; the message names what is wrong and what to do about it."""


def bare_environ() -> dict[str, str]:
    """This process's environment without what would lead another Python or pip astray."""
    environ = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")
    }
    environ.update(
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_REQUIRE_VIRTUALENV="0",
        PIP_ROOT_USER_ACTION="ignore",
        PIP_USER="0",
        PYTHONNOUSERSITE="1",
    )
    return environ


def pinned_names(requirements: list[Path]) -> list[str]:
    """The distributions that the requirement files name, in order."""
    lines = (line.split("#")[0].strip() for file in requirements for line in file.read_text().splitlines())
    return [line.split("==")[0] for line in lines if line]


def make_venv(folder: Path, *options: str, lock: int | None = None) -> None:
    """Make a virtual environment of the Python that runs this. Raises SetupError with what went wrong."""
    _run(
        [sys.executable, "-m", "venv", *options, str(folder)], f"cannot make an environment in {folder}", lock
    )


def install_editable(python: Path, root: Path) -> None:
    """Install the project at `root` editable into `python`'s environment, offline. Raises SetupError."""
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-e",
        str(root),
    ]
    _run(command, f"pip could not install {root}", None)


def install(python: Path, requirements: list[Path], *, log: Path, label: str, lock: int) -> None:
    """Install pinned requirement files with pip, without dependencies.

    Everything pip says goes to `log`; its last lines are in the SetupError raised when it fails. pip inherits the
    descriptor `lock`.
    """
    total = len(pinned_names(requirements))
    command = [str(python), "-m", "pip", "install", "--no-deps", "--retries", "8", "--progress-bar", "off"]
    for file in requirements:
        command += ["-r", str(file)]
    progress = _Progress(label)
    collected = 0
    with log.open("a") as transcript:
        # pip's warnings about the local configuration go to the log only.
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=transcript,
            text=True,
            env=bare_environ(),
            pass_fds=(lock,),
        )
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                transcript.write(line)
                if line.startswith("Collecting "):
                    collected += 1
                    progress.show(f"fetching {collected}/{total} packages")
                elif line.startswith("Installing collected"):
                    progress.show(f"unpacking {total} packages", now=True)
            status = pip.wait()
        except BaseException:
            pip.terminate()
            pip.wait()
            raise
        finally:
            progress.end()
    if status:
        raise SetupError(f"{label}: pip could not install the packages:\n{_last_words(log.read_text())}")


def _run(command: list[str], failure: str, lock: int | None) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=bare_environ(),
        pass_fds=() if lock is None else (lock,),
        check=False,
    )
    if done.returncode:
        raise SetupError(f"{failure}:\n{_last_words(done.stdout)}")


def _last_words(output: str) -> str:
    """The end of what pip said, without its warnings, which are about other things than a failure."""
    said = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "\n".join(said[-12:])


class _Progress:
    """One line that is rewritten on a terminal, or a new line every ten seconds elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def show(self, text: str, *, now: bool = False) -> None:
        clock = time.monotonic()
        if not (self._terminal or now or clock - self._shown > 10):
            return
        self._shown = clock
        line = f"{self._label}: {text} ({clock - self._started:.0f} s)"
        print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", flush=True)

    def end(self) -> None:
        if self._terminal:
            print(flush=True)
