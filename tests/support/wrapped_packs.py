"""A real pack with something between it and its reader: a log, injected failures, a gate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from ziggurat.residency.ports import RowPack
from ziggurat.stores.counts import PackCounts
from ziggurat.stores.errors import RowReadError
from ziggurat.stores.pack import RowRequest, RowResult


class WrappedPack:
    """log: keys in the order they were asked for. failing: key -> "io" or "checksum"; such a row's bytes are
    garbage, as after a torn read. before(key): called when a row's bytes have arrived, before anyone is told.
    backwards: rows arrive in the opposite order of that in which they were asked for.
    """

    def __init__(self, pack: RowPack) -> None:
        self.pack = pack
        self.header = pack.header
        self.log: list[int] = []
        self.failing: dict[int, str] = {}
        self.before: Callable[[int], None] = lambda key: None
        self.backwards = False
        self.closed = False

    def read_rows(self, wanted: Sequence[RowRequest]) -> Generator[RowResult, None, None]:
        keys = {(r.layer, r.expert): r.layer * self.header.experts + r.expert for r in wanted}
        buffers = {(r.layer, r.expert): r.buffer for r in wanted}
        self.log += keys.values()
        with closing(self.pack.read_rows(wanted)) as results:
            yield from self._results(self._ordered(results, list(keys)), keys, buffers)

    def _ordered(self, results: Iterable[RowResult], asked: list[tuple[int, int]]) -> Iterable[RowResult]:
        if not self.backwards:
            return results
        return sorted(results, key=lambda result: -asked.index((result.layer, result.expert)))

    def _results(
        self,
        results: Iterable[RowResult],
        keys: dict[tuple[int, int], int],
        buffers: dict[tuple[int, int], memoryview],
    ) -> Generator[RowResult, None, None]:
        for result in results:
            place = (result.layer, result.expert)
            self.before(keys[place])
            kind = self.failing.get(keys[place])
            if kind is None:
                yield result
                continue
            buffers[place][:] = b"\xaa" * len(buffers[place])
            layer_id = self.header.layer_ids[result.layer]
            error = RowReadError(
                layer_id,
                result.expert,
                Path("pack"),
                f"injected {kind} failure",
                "checksum" if kind == "checksum" else "io",
            )
            yield RowResult(result.layer, result.expert, 0, result.seconds, error)

    def counts(self) -> PackCounts:
        return self.pack.counts()

    def close(self) -> None:
        self.closed = True
        self.pack.close()
