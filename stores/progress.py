"""How a long job over rows tells its caller where it stands."""

from __future__ import annotations

from typing import Protocol


class ProgressSink(Protocol):
    """Called from the thread that runs the job."""

    def start(self, total_rows: int, total_bytes: int) -> None:
        """The work of this run; rows that an earlier run left finished are not in it."""
        ...

    def advance(self, rows: int, nbytes: int) -> None: ...

    def finish(self) -> None:
        """Called exactly once after `start`, also when the job fails."""
        ...


class NoProgress:
    """A sink that shows nothing."""

    def start(self, total_rows: int, total_bytes: int) -> None:
        pass

    def advance(self, rows: int, nbytes: int) -> None:
        pass

    def finish(self) -> None:
        pass
