"""Building pack files from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ziggurat.stores.buildfile import BuildFile, building_path
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.chunks import lane_bytes, working_bytes
from ziggurat.stores.encoder import RowEncoder
from ziggurat.stores.errors import DiskFullError
from ziggurat.stores.filling import fill
from ziggurat.stores.locking import build_lock
from ziggurat.stores.pack import Pack
from ziggurat.stores.packformat import PackHeader, file_bytes, pack_filename, stride_of
from ziggurat.stores.progress import NoProgress, ProgressSink
from ziggurat.stores.workers import FIRST_PROCESS_BYTES, LANES_OF_PROCESS, PROCESS_BYTES, workers_of
from ziggurat.stores.writing import free_bytes, make_folder, remove_folders

LOCK_SUFFIX = ".lock"
MAX_LANES = 32
MAX_PROCESSES = 32


def expected_header(
    checkpoint: Checkpoint, encoder: RowEncoder, tp_rank: int = 0, tp_size: int = 1
) -> PackHeader:
    """What the pack of one rank says about itself. Raises what `encoder.row_bytes` raises for sizes it cannot do."""
    row_bytes = encoder.row_bytes(tp_size)
    return PackHeader(
        codec=encoder.name,
        codec_version=encoder.version,
        layers=len(checkpoint.layer_ids),
        experts=checkpoint.experts,
        hidden=checkpoint.hidden,
        intermediate=checkpoint.intermediate,
        row_bytes=row_bytes,
        stride=stride_of(row_bytes),
        tp_rank=tp_rank,
        tp_size=tp_size,
        identity=checkpoint.identity,
        layer_ids=checkpoint.layer_ids,
    )


def default_lanes(*, processes: bool = False) -> int:
    """Chunks under way: one for each processor this process may use, two that wait for the disk; at most 32.

    processes: as many processes as processors, at most 32, and the lanes of each.
    """
    processors = len(os.sched_getaffinity(0))
    if processes:
        return LANES_OF_PROCESS * min(max(processors, 2), MAX_PROCESSES)
    return min(processors + 2, MAX_LANES)


def peak_bytes(
    checkpoint: Checkpoint,
    encoder: RowEncoder,
    tp_size: int = 1,
    ranks: Sequence[int] | None = None,
    lanes: int | None = None,
    *,
    processes: bool = False,
) -> int:
    """Upper bound of the host memory `build_pack` takes on top of the process, in bytes.

    For each lane a chunk of the checkpoint and its rows (`lane_bytes`); an encoder's working memory for each lane or,
    with `processes`, for each process, of whose lanes one quantizes at a time; and those processes' own. Files are read
    and written past the page cache where the filesystem allows it; what goes through it, the kernel can take back.
    """
    count = tp_size if ranks is None else len(ranks)
    lanes = default_lanes(processes=processes) if lanes is None else lanes
    strides = [stride_of(encoder.row_bytes(tp_size))] * count
    at_once, own = lanes, 0
    if processes and lanes > 1:
        at_once = 1 + workers_of(lanes)
        own = FIRST_PROCESS_BYTES + (at_once - 1) * PROCESS_BYTES
    return own + lanes * lane_bytes(checkpoint, strides) + at_once * working_bytes(checkpoint)


def build_pack(
    checkpoint: Checkpoint,
    encoder: RowEncoder,
    folder: Path,
    tp_size: int = 1,
    ranks: Sequence[int] | None = None,
    progress: ProgressSink | None = None,
    *,
    lanes: int | None = None,
    processes: bool = False,
    rebuild: bool = False,
) -> list[Path]:
    """Build the packs of `ranks` (default: all) in one pass over the checkpoint; returns their paths in that order.

    A pack that is there already is kept; one that does not fit or is damaged is an error, unless `rebuild`, which
    replaces all. An unfinished build of an earlier run is continued. Same inputs, same bytes.

    So many `lanes` each read, encode and write a chunk (some experts of a layer) at a time, in threads of this process,
    or, with `processes`, all but a few in other processes, for which the encoder must be one that can be pickled.
    All ranks share the reading and the quantization. Host memory: see `peak_bytes`.

    After an error the folder is as it was: files this run created are gone, an unfinished build of an earlier run keeps
    its good rows. (An interrupt or a kill leaves the unfinished file, to be continued.)

    Raises PackLockedError, DiskFullError, PackWriteError, PackError for a bad pack that is there, and whatever the
    encoder raises, such as its error for weights that are not finite.
    """
    wanted = range(tp_size) if ranks is None else ranks
    headers = [expected_header(checkpoint, encoder, rank, tp_size) for rank in wanted]
    folder = Path(folder)
    todo = headers if rebuild else _without_pack(folder, headers)
    if todo:
        made = make_folder(folder)
        try:
            with _locks(folder, todo):
                if not rebuild:
                    todo = _without_pack(folder, todo)  # another builder may just have finished
                _check_space(folder, todo)
                with _open_files(folder, todo, not rebuild) as files:
                    fill(
                        checkpoint,
                        encoder,
                        files,
                        progress or NoProgress(),
                        lanes or default_lanes(processes=processes),
                        processes=processes,
                    )
                    for file in files:
                        file.finish()
        except BaseException:
            remove_folders(made)
            raise
    return [folder / pack_filename(header) for header in headers]


def _without_pack(folder: Path, headers: Sequence[PackHeader]) -> list[PackHeader]:
    todo = []
    for header in headers:
        path = folder / pack_filename(header)
        if os.path.exists(path):  # False, not an error, where the folder cannot be searched
            Pack.open(path, expect=header).close()
        else:
            todo.append(header)
    return todo


@contextmanager
def _locks(folder: Path, headers: Sequence[PackHeader]) -> Iterator[None]:
    with ExitStack() as stack:
        for header in headers:
            stack.enter_context(build_lock(folder / (pack_filename(header) + LOCK_SUFFIX)))
        yield


@contextmanager
def _open_files(folder: Path, headers: Sequence[PackHeader], resume: bool) -> Iterator[list[BuildFile]]:
    """The unfinished files, closed afterwards; removed after an error if this run created them."""
    files: list[BuildFile] = []
    discard = False
    try:
        for header in headers:
            files.append(BuildFile(folder, header, resume=resume))  # noqa: PERF401  # those opened must be closed
        yield files
    except (KeyboardInterrupt, SystemExit):
        raise  # to be continued
    except BaseException:
        discard = True
        raise
    finally:
        for file in files:
            file.close(discard=discard)


def _check_space(folder: Path, headers: Sequence[PackHeader]) -> None:
    needed = 0
    for header in headers:
        path = building_path(folder, header)
        present = path.stat().st_blocks * 512 if path.exists() else 0  # continued, or else removed
        needed += max(file_bytes(header) - present, 0)
    available = free_bytes(folder)
    if needed > available:
        raise DiskFullError(folder, needed, available)
