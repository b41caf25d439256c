"""What a folder's filesystem offers: free space, type, whether it can be written, and direct I/O, by trying."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ziggurat.allocators.mounts import mount_of, read_mounts

__all__ = ["DiskFacts"]

_BLOCKS = (512, 4096)  # what filesystems ask of direct I/O, smallest first


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Facts about the folder `path`, or about `probed`, its nearest existing ancestor, if it does not exist yet.

    `free` is what this user may still write, in bytes. `direct_io` is None where it could not be tried (nothing to
    read and no way to write); `direct_alignment` is the smallest offset and length it takes, in bytes.
    """

    path: Path
    probed: Path
    exists: bool
    fs_type: str | None
    free: int
    writable: bool
    direct_io: bool | None
    direct_alignment: int | None

    @classmethod
    def probe(cls, path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> DiskFacts:
        """Looks at `path`. Writes and removes one nameless 8 KiB file in it if it can; leaves nothing behind.

        Raises OSError if no ancestor can be looked at, NotADirectoryError if the path is not a folder.
        """
        probed = _nearest_folder(path)
        space = os.statvfs(probed)
        mount = mount_of(probed, read_mounts(mountinfo))
        writable, alignment = _try_writing(probed)
        if alignment is None:
            alignment = _try_reading(probed)
        return cls(
            path=path,
            probed=probed,
            exists=path.is_dir(),
            fs_type=None if mount is None else mount.fstype,
            free=space.f_bavail * space.f_frsize,
            writable=writable,
            direct_io=None if alignment is None else alignment > 0,
            direct_alignment=alignment or None,
        )


def _nearest_folder(path: Path) -> Path:
    place = path.absolute()
    while True:
        try:
            if not stat.S_ISDIR(place.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
            return place.resolve()
        except FileNotFoundError:
            if place.is_symlink():
                raise  # a dangling link: a folder made "there" would not be where it points
            place = place.parent


def _try_writing(folder: Path) -> tuple[bool, int | None]:
    """(whether a file can be written, the direct alignment of reading it back or 0; None if not writable)."""
    try:
        # A temporary file that never had a name, or lost it at once: a kill in between leaves nothing.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2 * _BLOCKS[-1]))
            file.flush()
            os.fsync(file.fileno())
            return True, _direct_alignment(f"/proc/self/fd/{file.fileno()}")
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT), None  # full is not read-only: `free` tells


def _try_reading(folder: Path) -> int | None:
    """The direct alignment, or 0, found by reading any file of at least two blocks that is there; None without."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False) and entry.stat().st_size >= 2 * _BLOCKS[-1]:
                    return _direct_alignment(entry.path)
    except OSError:
        return None
    return None


def _direct_alignment(path: str) -> int:
    """The smallest block that a direct read of the file takes, 0 if it takes none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0  # EINVAL on a filesystem without it
    try:
        with mmap.mmap(-1, _BLOCKS[-1]) as page:
            for block in _BLOCKS:
                try:
                    # One block in, into memory aligned to a page: only offset and length are put to the test.
                    with memoryview(page)[:block] as buffer:
                        if os.preadv(handle, [buffer], block) == block:
                            return block
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        return 0
            return 0
    finally:
        os.close(handle)
