"""A row made anew from the checkpoint, for a pack whose own bytes are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock

import torch

from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.encoder import RowEncoder
from ziggurat.stores.errors import ExpertsAbsentError, RebuildError, StoreError
from ziggurat.stores.packformat import PackHeader


class CheckpointRows:
    """A `Rebuild` from the checkpoint that a pack was made from, opened when the first row is needed.

    make_encoder: the pack's codec, bound to that checkpoint. Safe for concurrent callers, which wait for each other.
    """

    def __init__(
        self, folder: Path, header: PackHeader, make_encoder: Callable[[Checkpoint], RowEncoder]
    ) -> None:
        self._folder = folder
        self._header = header
        self._make_encoder = make_encoder
        self._opened: tuple[Checkpoint, RowEncoder] | None = None
        self._lock = Lock()

    def __call__(self, layer: int, expert: int, buffer: memoryview) -> None:
        header = self._header
        try:
            with self._lock:
                checkpoint, encoder = self._open()
                row = torch.frombuffer(buffer, dtype=torch.uint8, count=header.stride)
                row.zero_()
                encoder.encode(
                    checkpoint.expert(layer, expert, copied=True),
                    header.tp_size,
                    {header.tp_rank: row[: header.row_bytes]},
                )
        except ExpertsAbsentError as e:
            raise RebuildError(
                f"the row cannot be made anew: {e}; delete the file and bring it again by `ziggurat import`"
            ) from e
        except (
            StoreError,
            OSError,
            ValueError,
            RuntimeError,
        ) as e:  # encoders raise their own kinds of ValueError
            raise RebuildError(f"the row cannot be made anew from {self._folder}: {e}") from e

    def _open(self) -> tuple[Checkpoint, RowEncoder]:
        if self._opened is None:
            checkpoint = Checkpoint.open(self._folder)
            if checkpoint.identity != self._header.identity:
                checkpoint.close()
                raise RebuildError("it is another checkpoint by now")
            encoder = self._make_encoder(checkpoint)
            if encoder.version != self._header.codec_version:
                checkpoint.close()
                raise RebuildError(f"its codec is of version {encoder.version} by now")
            self._opened = checkpoint, encoder
        return self._opened
