"""A progress sink that remembers what it was told."""

from __future__ import annotations

from typing import Any


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, total_rows: int, total_bytes: int) -> None:
        self.calls.append(("start", total_rows, total_bytes))

    def advance(self, rows: int, nbytes: int) -> None:
        self.calls.append(("advance", rows, nbytes))

    def finish(self) -> None:
        self.calls.append(("finish",))

    @property
    def advanced(self) -> tuple[int, int]:
        """Sum of rows and bytes."""
        steps = [call[1:] for call in self.calls if call[0] == "advance"]
        return sum(rows for rows, _ in steps), sum(nbytes for _, nbytes in steps)
