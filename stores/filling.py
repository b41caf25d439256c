"""Encoding the experts that unfinished packs lack, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from queue import SimpleQueue

import torch

from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.buildfile import BuildFile
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.encoder import RowEncoder
from ziggurat.stores.packformat import row_digest
from ziggurat.stores.progress import ProgressSink

_Digests = dict[int, int]  # place in the list of files -> digest
_Targets = dict[int, list[int]]  # expert -> places of the files that lack it


def fill(
    checkpoint: Checkpoint,
    encoder: RowEncoder,
    files: Sequence[BuildFile],
    progress: ProgressSink,
    threads: int,
) -> None:
    """Write every absent row of the files, which are the ranks of one tensor-parallel size.

    While a layer is encoded the next one is read ahead and the one before it is synced. Raises the first error of
    the encoder or of a write, after all threads have stopped.
    """
    layers = [(layer, _absent(files, layer)) for layer in range(len(checkpoint.layer_ids))]
    todo = [(layer, targets) for layer, targets in layers if targets]
    rows = sum(len(places) for _, targets in todo for places in targets.values())
    if not rows:
        return
    stride = files[0].header.stride
    encode = _row_encoder(checkpoint, encoder, files, threads)
    torch_threads = torch.get_num_threads()
    progress.start(rows, rows * stride)
    try:
        with (
            ThreadPoolExecutor(threads, "ziggurat-encode", torch.set_num_threads, (1,)) as encoders,
            ThreadPoolExecutor(1, "ziggurat-commit") as committer,
        ):
            commit: Future[None] | None = None
            checkpoint.prefetch_layer(todo[0][0])
            for (layer, targets), following in zip(todo, [*todo[1:], None], strict=True):
                if following is not None:
                    checkpoint.prefetch_layer(following[0])
                futures = {
                    encoders.submit(encode, layer, expert, places): expert
                    for expert, places in targets.items()
                }
                digests: list[_Digests] = [{} for _ in files]
                try:
                    for future in as_completed(futures):
                        of_files = future.result()
                        for place, digest in of_files.items():
                            digests[place][futures[future]] = digest
                        progress.advance(len(of_files), len(of_files) * stride)
                    if commit is not None:
                        commit.result()
                except BaseException:
                    encoders.shutdown(wait=True, cancel_futures=True)
                    raise
                commit = committer.submit(_commit, files, layer, digests)
                checkpoint.release_layer(layer)
            if commit is not None:
                commit.result()
    finally:
        torch.set_num_threads(torch_threads)
        progress.finish()


def _absent(files: Sequence[BuildFile], layer: int) -> _Targets:
    targets: _Targets = {}
    for place, file in enumerate(files):
        for expert in file.missing(layer):
            targets.setdefault(expert, []).append(place)
    return dict(sorted(targets.items()))


def _commit(files: Sequence[BuildFile], layer: int, digests: Sequence[_Digests]) -> None:
    for file, of_file in zip(files, digests, strict=True):
        if of_file:
            file.commit(layer, of_file)


def _row_encoder(
    checkpoint: Checkpoint, encoder: RowEncoder, files: Sequence[BuildFile], threads: int
) -> Callable[[int, int, list[int]], _Digests]:
    """A function that encodes one expert and writes its rows; memory for `threads` of it at a time is made here."""
    header = files[0].header
    free: SimpleQueue[list[memoryview]] = SimpleQueue()
    for _ in range(threads):
        free.put([aligned_buffer(header.stride) for _ in files])

    def encode(layer: int, expert: int, places: list[int]) -> _Digests:
        buffers = free.get()
        try:
            outs = {}
            for place in places:
                row = torch.frombuffer(buffers[place], dtype=torch.uint8)
                row.zero_()  # bytes an encoder leaves alone must not come from another expert
                outs[files[place].header.tp_rank] = row[: header.row_bytes]
            encoder.encode(checkpoint.expert(layer, expert), header.tp_size, outs)
            digests = {}
            for place in places:
                files[place].write_row(layer, expert, buffers[place])
                digests[place] = row_digest(buffers[place])
            return digests
        finally:
            free.put(buffers)

    return encode
