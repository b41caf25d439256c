"""Encoding the experts that unfinished packs lack, layer by layer, several chunks at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from queue import SimpleQueue

import torch

from ziggurat.stores.buildfile import BuildFile
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.chunks import Chunk, Digests, Lane, chunks_of, experts_per_chunk
from ziggurat.stores.encoder import RowEncoder
from ziggurat.stores.loading import ExpertLoader
from ziggurat.stores.progress import ProgressSink
from ziggurat.stores.workers import WorkerProcesses, own_lanes

Build = Callable[[Chunk], Digests]


def fill(
    checkpoint: Checkpoint,
    encoder: RowEncoder,
    files: Sequence[BuildFile],
    progress: ProgressSink,
    lanes: int,
    *,
    processes: bool = False,
    lane: type[Lane] = Lane,
) -> None:
    """Write every absent row of the files, which are the ranks of one tensor-parallel size.

    So many lanes work on a chunk each: threads of this process, or a few threads, which begin at once, and the others
    in processes, which take a second or two to start. Layers that are done are synced meanwhile. lane: what they do
    with a chunk.
    Raises the first error of the encoder or of a write, after all have stopped.
    """
    per_chunk = experts_per_chunk(checkpoint)
    chunks = [
        chunk
        for layer in range(len(checkpoint.layer_ids))
        for chunk in chunks_of(layer, [file.missing(layer) for file in files], per_chunk)
    ]
    if not chunks:
        return
    rows = sum(chunk.rows for chunk in chunks)
    progress.start(rows, rows * files[0].header.stride)
    torch_threads = torch.get_num_threads()
    try:
        rows_of = [file.rows for file in files]
        with ExitStack() as stack:
            others: Sequence[Build] = ()
            if processes and lanes > 1:
                workers = WorkerProcesses(lanes - own_lanes(lanes), checkpoint, encoder, rows_of, lane)
                others = stack.enter_context(workers).builders
            loader = stack.enter_context(closing(ExpertLoader(checkpoint)))
            own = [lane(checkpoint, loader, encoder, rows_of).build for _ in range(lanes - len(others))]
            _run(chunks, files, [*own, *others], progress)
    finally:
        torch.set_num_threads(torch_threads)
        progress.finish()


def _run(
    chunks: Sequence[Chunk], files: Sequence[BuildFile], builds: Sequence[Build], progress: ProgressSink
) -> None:
    """Have the chunks built, in order, and commit each layer when its last chunk is done."""
    free: SimpleQueue[Build] = SimpleQueue()
    for build in builds:
        free.put(build)

    def work(chunk: Chunk) -> tuple[Chunk, Digests]:
        build = free.get()
        try:
            return chunk, build(chunk)
        finally:
            free.put(build)

    stride = files[0].header.stride
    left = Counter(chunk.layer for chunk in chunks)
    digests: dict[int, Digests] = {layer: [{} for _ in files] for layer in left}
    with ExitStack() as stack:
        pool = stack.enter_context(
            ThreadPoolExecutor(len(builds), "ziggurat-pack", torch.set_num_threads, (1,))
        )
        committer = stack.enter_context(ThreadPoolExecutor(1, "ziggurat-commit"))
        commits: list[Future[None]] = []
        try:
            for future in as_completed([pool.submit(work, chunk) for chunk in chunks]):
                chunk, found = future.result()
                progress.advance(chunk.rows, chunk.rows * stride)
                for mine, new in zip(digests[chunk.layer], found, strict=True):
                    mine.update(new)
                left[chunk.layer] -= 1
                if not left[chunk.layer]:
                    commits.append(committer.submit(_commit, files, chunk.layer, digests.pop(chunk.layer)))
                while commits and commits[0].done():
                    commits.pop(0).result()
            for commit in commits:
                commit.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _commit(files: Sequence[BuildFile], layer: int, digests: Digests) -> None:
    for file, of_file in zip(files, digests, strict=True):
        if of_file:
            file.commit(layer, of_file)
