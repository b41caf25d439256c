"""Logits of every step, written bit for bit for the determinism tests.

One file per rank, a sequence of numpy arrays per step: request names, position of the last token of each request, and
the logits widened to float32 (exact from bfloat16 and float16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """requests: names in batch order; tokens: scheduled tokens of each; logits: float32 [rows, vocabulary]."""

    requests: tuple[str, ...]
    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32]


class LogitsCapture:
    """Appends steps to ``folder/logits.rank{rank}.npys``."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = (folder / f"logits.rank{rank}.npys").open("wb")

    def add(self, requests: Sequence[str], tokens: Sequence[int], logits: torch.Tensor) -> None:
        np.save(self._file, np.array(requests, dtype=np.str_))
        np.save(self._file, np.array(tokens, dtype=np.int64))
        np.save(self._file, logits.detach().to("cpu", torch.float32).numpy())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LogitsCapture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_capture(path: Path) -> Iterator[CapturedStep]:
    """Steps of a capture file, in order; a step that a killed process left half-written ends the sequence."""
    with path.open("rb") as file:
        yield from read_steps(file)


def read_steps(file: IO[bytes]) -> Iterator[CapturedStep]:
    """Steps from where an open capture file stands."""
    while True:
        try:
            requests = np.load(file, allow_pickle=False)
            tokens = np.load(file, allow_pickle=False)
            logits = np.load(file, allow_pickle=False)
        except (EOFError, ValueError):
            return
        yield CapturedStep(tuple(str(r) for r in requests), tuple(int(t) for t in tokens), logits)
