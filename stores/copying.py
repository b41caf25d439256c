"""Bringing finished packs into another folder, every row checked on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.builder import LOCK_SUFFIX
from ziggurat.stores.buildfile import BuildFile, building_path, is_resumable
from ziggurat.stores.cloning import clone_file
from ziggurat.stores.errors import DiskFullError
from ziggurat.stores.locking import build_lock
from ziggurat.stores.pack import Pack, RowRequest
from ziggurat.stores.packformat import PackHeader, file_bytes, pack_filename, row_digest
from ziggurat.stores.progress import NoProgress, ProgressSink
from ziggurat.stores.verify import verify_pack
from ziggurat.stores.writing import free_bytes, make_folder, remove_folders, sync_folder, writing

_BATCH_BYTES = 256 << 20


def copy_packs(
    sources: Sequence[Pack], folder: Path, progress: ProgressSink | None = None, *, beside: int = 0
) -> list[Path]:
    """Copy open packs into `folder` under their own names; returns the copies' paths in that order.

    A pack that is there already is kept, if it is this one. Space is checked first; beside: bytes that the caller will
    write to this filesystem too. Where the filesystem can share blocks, copies are clones and take none.

    Every row of a copy was compared with its checksum when its name appears. A row that the source cannot give, nor
    make anew, is an error, and so is a row that is absent. A copy that was killed is continued; after an error a file
    that this run created is gone. Holds at most 256 MiB of rows, or two if they are larger.

    Raises RowReadError, PackLockedError, DiskFullError, PackWriteError, and PackError for a bad pack that is there.
    """
    folder = Path(folder)
    sink = progress or NoProgress()
    todo = _without_copy(folder, sources)
    made = make_folder(folder)
    try:
        with _locks(folder, todo):
            todo = _without_copy(folder, todo)  # another process may just have finished
            clones = [source for source in todo if _clone(source, folder)]
            try:
                others = [source for source in todo if source not in clones]
                _check_space(folder, [source.header for source in others], beside)
                if todo:
                    _copy_all(clones, others, folder, sink)
            except (KeyboardInterrupt, SystemExit):
                raise  # to be continued
            except BaseException:
                for source in clones:
                    building_path(folder, source.header).unlink(missing_ok=True)
                raise
    except BaseException:
        remove_folders(made)
        raise
    return [folder / pack_filename(source.header) for source in sources]


def _without_copy(folder: Path, sources: Sequence[Pack]) -> list[Pack]:
    todo = []
    for source in sources:
        path = folder / pack_filename(source.header)
        if os.path.exists(path):
            Pack.open(path, expect=source.header).close()
        else:
            todo.append(source)
    return todo


@contextmanager
def _locks(folder: Path, sources: Sequence[Pack]) -> Iterator[None]:
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(build_lock(folder / (pack_filename(source.header) + LOCK_SUFFIX)))
        yield


def _clone(source: Pack, folder: Path) -> bool:
    path = building_path(folder, source.header)
    return not is_resumable(path, source.header) and clone_file(source.path, path)


def _check_space(folder: Path, headers: Sequence[PackHeader], beside: int) -> None:
    needed = beside
    for header in headers:
        path = building_path(folder, header)
        present = path.stat().st_blocks * 512 if path.exists() else 0  # continued, or else removed
        needed += max(file_bytes(header) - present, 0)
    available = free_bytes(folder)
    if needed > available:
        raise DiskFullError(folder, needed, available)


def _copy_all(clones: Sequence[Pack], others: Sequence[Pack], folder: Path, sink: ProgressSink) -> None:
    rows = [source.header for source in (*clones, *others)]
    sink.start(sum(header.rows for header in rows), sum(header.rows_nbytes for header in rows))
    try:
        for source in clones:
            if not _finish_clone(source, folder, sink):
                _copy_rows(source, folder, sink)
        for source in others:
            _copy_rows(source, folder, sink)
    finally:
        sink.finish()


def _finish_clone(source: Pack, folder: Path, sink: ProgressSink) -> bool:
    """Check a clone's rows and give it its name; False, and no clone, if a row is bad: the source may make it anew."""
    path = building_path(folder, source.header)
    if not verify_pack(path, _RowsOf(sink)).ok:
        path.unlink()
        return False
    with writing(path, 0):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        path.rename(folder / pack_filename(source.header))
        sync_folder(folder)
    return True


def _copy_rows(source: Pack, folder: Path, sink: ProgressSink) -> None:
    """Copy what the unfinished copy lacks, a layer at a time; while one is copied the one before it is synced."""
    header = source.header
    file = BuildFile(folder, header)
    try:
        count = min(header.experts, max(2, _BATCH_BYTES // header.stride))
        buffers = [aligned_buffer(header.stride) for _ in range(count)]
        with ThreadPoolExecutor(1, "ziggurat-commit") as committer:
            commit: Future[None] | None = None
            for layer in range(header.layers):
                digests = _copy_layer(source, file, layer, buffers, sink)
                if commit is not None:
                    commit.result()
                commit = committer.submit(file.commit, layer, digests) if digests else None
            if commit is not None:
                commit.result()
        file.finish()
    except (KeyboardInterrupt, SystemExit):
        file.close()  # to be continued
        raise
    except BaseException:
        file.close(discard=True)
        raise
    file.close()


def _copy_layer(
    source: Pack, file: BuildFile, layer: int, buffers: Sequence[memoryview], sink: ProgressSink
) -> dict[int, int]:
    """Write the rows of a layer that the copy lacks; returns their digests. Raises the first row's error."""
    header = source.header
    missing = file.missing(layer)
    there = header.experts - len(missing)
    sink.advance(there, there * header.stride)
    digests: dict[int, int] = {}
    for first in range(0, len(missing), len(buffers)):
        places = dict(zip(missing[first : first + len(buffers)], buffers, strict=False))
        wanted = [RowRequest(layer, expert, buffer) for expert, buffer in places.items()]
        with closing(source.read_rows(wanted)) as ends:
            for end in ends:
                if end.error is not None:
                    raise end.error
                # Not the source's checksum: of a row made anew that may be what is damaged.
                digests[end.expert] = row_digest(places[end.expert])
                file.write_row(layer, end.expert, places[end.expert])
                sink.advance(1, header.stride)
    return digests


class _RowsOf:
    """A part of a longer job: its rows count, its start and end do not."""

    def __init__(self, whole: ProgressSink) -> None:
        self._whole = whole

    def start(self, total_rows: int, total_bytes: int) -> None:
        pass

    def advance(self, rows: int, nbytes: int) -> None:
        self._whole.advance(rows, nbytes)

    def finish(self) -> None:
        pass
