"""Every error the stores raise. Each message names the value that is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

RowFailure = Literal["io", "short", "checksum", "absent", "timeout"]


class StoreError(Exception):
    """Base of all errors of this package."""


class CheckpointError(StoreError):
    """A checkpoint cannot be used. `tensors` lists the tensors at fault, if single tensors are."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(tensors))
        self.message = message
        self.tensors = tuple(tensors)

    def __str__(self) -> str:
        return self.message


class ExpertsAbsentError(CheckpointError):
    """A checkpoint's expert tensors are needed and were left out of its folder."""


class ManifestError(CheckpointError):
    """The manifest of a folder without expert tensors is damaged, or the folder is not the one it was written for."""


class HeaderError(StoreError):
    """A file is not a well-formed safetensors file.

    `kind` is "truncated" (the file ends too early), "extended" (bytes follow the last tensor) or "malformed".
    """

    def __init__(self, path: Path, kind: Literal["truncated", "extended", "malformed"], problem: str) -> None:
        super().__init__(path, kind, problem)
        self.path = path
        self.kind = kind
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class PackError(StoreError):
    """A pack file cannot be opened or used."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class PackMissingError(PackError):
    """There is no such pack."""


class PackIncompleteError(PackError):
    """The pack was never finished: rows are absent."""


class PackCorruptError(PackError):
    """The pack's header or metadata is damaged, or bytes follow its end."""


class PackTruncatedError(PackError):
    """The pack file is shorter than its header says."""


class PackMismatchError(PackError):
    """The pack is sound but is not the pack that is wanted."""

    def __init__(self, path: Path, field: str, expected: object, found: object, advice: str) -> None:
        super().__init__(path, f"{field} is {found}, but {expected} is needed; {advice}")
        self.args = (path, field, expected, found, advice)
        self.field = field
        self.expected = expected
        self.found = found
        self.advice = advice


class ExportError(StoreError):
    """A folder cannot take an export, or what was exported changed meanwhile."""


class PackLockedError(StoreError):
    """Another process builds the same pack. `pid` is None if it could not be read."""

    def __init__(self, lock: Path, pid: int | None) -> None:
        super().__init__(lock, pid)
        self.lock = lock
        self.pid = pid

    def __str__(self) -> str:
        who = f"process {self.pid}" if self.pid is not None else "another process"
        return f"{who} is building this pack (lock {self.lock}); wait for it, or stop it and try again"


class PackWriteError(StoreError):
    """The pack folder cannot be written to."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class DiskFullError(PackWriteError):
    """The filesystem (or a limit on file sizes) has no room. `short`: how many bytes are lacking, at least."""

    def __init__(self, path: Path, needed: int, available: int, cause: str = "not enough disk space") -> None:
        short = max(needed - available, 1)
        super().__init__(
            path,
            f"{cause}: {needed} bytes needed, {available} available, {short} bytes short; "
            "free that much or choose another folder (tiers.disk.path, or --to of an export)",
        )
        self.args = (path, needed, available, cause)
        self.needed = needed
        self.available = available
        self.short = short


class ReaderError(StoreError):
    """A reader cannot be made: unknown name, bad option, or a file that cannot be opened."""


class RebuildError(StoreError):
    """A damaged row cannot be made anew from the checkpoint."""


class RowReadError(StoreError):
    """One expert's row could not be read.

    `kind`: "io" (the read failed), "short" (fewer bytes than a row arrived), "checksum" (the bytes are wrong,
    twice), "absent" (the row was never written) or "timeout" (the read has not returned).
    """

    def __init__(self, layer_id: int, expert: int, path: Path, reason: str, kind: RowFailure = "io") -> None:
        super().__init__(layer_id, expert, path, reason, kind)
        self.layer_id = layer_id
        self.expert = expert
        self.path = path
        self.reason = reason
        self.kind: RowFailure = kind

    def __str__(self) -> str:
        return f"layer {self.layer_id} expert {self.expert} of {self.path}: {self.reason}"
