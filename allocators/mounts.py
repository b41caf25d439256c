"""The mount table, as /proc/self/mountinfo states it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["Mount", "mount_of", "read_mounts"]

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount: `source` is the folder of the filesystem that appears at `point`."""

    source: str
    point: PurePosixPath
    fstype: str
    options: tuple[str, ...]


def read_mounts(mountinfo: Path) -> tuple[Mount, ...]:
    """Every mount, in mount order; none if the file cannot be read (no /proc)."""
    try:
        text = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ()
    mounts = []
    for line in text.splitlines():
        # id parent major:minor source point options [tags…] - fstype device super-options   (proc(5))
        before, found, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if found and len(left) >= 6 and len(right) >= 3:
            options = (*left[5].split(","), *right[2].split(","))
            mounts.append(Mount(_plain(left[3]), PurePosixPath(_plain(left[4])), right[0], options))
    return tuple(mounts)


def mount_of(path: Path, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that `path` (absolute, without links) is on: the deepest one, of equals the last."""
    found: Mount | None = None
    for mount in mounts:
        if path.is_relative_to(mount.point) and (
            found is None or len(mount.point.parts) >= len(found.point.parts)
        ):
            found = mount
    return found


def _plain(text: str) -> str:
    # Blanks and backslashes in names are written as octal escapes.
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
