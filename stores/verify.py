"""Checking every row of a pack against its checksum."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.pack import Pack, RowRequest
from ziggurat.stores.progress import NoProgress, ProgressSink
from ziggurat.stores.quarantine import Rebuild
from ziggurat.stores.readers.base import Reader

_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """rows: how many there are. bad: (layer id, expert, reason) of each bad one, in order of layer and expert.

    mended: (layer id, expert) of those that were bad and are right on the disk now.
    """

    path: Path
    rows: int
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    mended: list[tuple[int, int]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.bad


def verify_pack(
    path: Path,
    progress: ProgressSink | None = None,
    *,
    reader: Reader | None = None,
    rebuild: Rebuild | None = None,
) -> VerifyReport:
    """Read every row of a pack and compare checksums; absent rows are bad rows.

    rebuild: makes bad rows anew, such as `CheckpointRows`; they are written back and read once more. Without it
    nothing is written. May be interrupted at any time, and run beside readers of the same pack.
    Holds at most 256 MiB of rows, or two if they are larger. Raises PackError if the file is no sound pack as a whole.
    """
    sink = progress or NoProgress()
    pack = Pack.open(path, reader=reader, verify="always", allow_absent=True, rebuild=rebuild)
    try:
        header = pack.header
        report = VerifyReport(pack.path, header.rows)
        count = min(header.rows, max(2, _BATCH_BYTES // header.stride))
        buffers = [aligned_buffer(header.stride) for _ in range(count)]
        sink.start(header.rows, header.rows_nbytes)
        try:
            for first in range(0, header.rows, count):
                rows = range(first, min(first + count, header.rows))
                wanted = [RowRequest(*divmod(row, header.experts), buffers[i]) for i, row in enumerate(rows)]
                restored = []
                for result in pack.read_rows(wanted):
                    if (error := result.error) is not None:
                        report.bad.append((error.layer_id, error.expert, error.reason))
                    elif result.restored:
                        restored.append(RowRequest(result.layer, result.expert, buffers[0]))
                    sink.advance(1, header.stride)
                for one in restored:
                    _read_again(pack, one, report)
        finally:
            sink.finish()
        report.bad.sort()
        report.mended.sort()
        return report
    finally:
        pack.close()


def _read_again(pack: Pack, row: RowRequest, report: VerifyReport) -> None:
    """Whether a row that was made anew is right on the disk, too."""
    place = pack.header.layer_ids[row.layer], row.expert
    (result,) = pack.read_rows([row])
    if result.error is None and not result.restored:
        report.mended.append(place)
    else:
        report.bad.append((*place, "it was made anew from the checkpoint, but cannot be written back"))
