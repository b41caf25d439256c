"""A progress bar for jobs over rows: rows, bytes, rate and remaining time."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class RowProgress:
    """Shows a ``ProgressSink`` job on standard error; nothing where that is no terminal, but a closing line."""

    def __init__(self, what: str, unit: str = "rows") -> None:
        self._what = what
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rows]}/{task.fields[of]} " + unit),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._rows = 0

    def start(self, total_rows: int, total_bytes: int) -> None:
        self._rows = 0
        self._task = self._bar.add_task(self._what, total=total_bytes, rows=0, of=total_rows)
        self._bar.start()

    def advance(self, rows: int, nbytes: int) -> None:
        assert self._task is not None
        self._rows += rows
        self._bar.update(self._task, advance=nbytes, rows=self._rows)

    def finish(self) -> None:
        self._bar.stop()

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
