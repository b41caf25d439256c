"""An engine that is started again beside an arena process does not read what the one before it has read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from support.engines import assert_identical, run_workloads
from support.keepers import start_keeper
from ziggurat.allocators.shared.lease import ask_status
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.pack import Pack, RowRequest, RowResult

TiersFactory = Callable[..., TiersConfig]


def test_a_restarted_engine_reads_no_row(
    demo_model: Path, make_tiers: TiersFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = Pack.read_rows

    def counted(self: Pack, wanted: Sequence[RowRequest]) -> Generator[RowResult]:
        reads.append(len(wanted))
        return real(self, wanted)

    monkeypatch.setattr(Pack, "read_rows", counted)
    socket = tmp_path / "socket"
    tiers = make_tiers(pool="25%", arena="100%", share=socket)
    process = start_keeper(socket)
    try:
        with open_engine(demo_model, tiers) as engine:
            first = run_workloads(engine)
        assert sum(reads) > 0
        (arena,) = ask_status(socket).arenas
        assert (arena.writer, arena.published) == (None, sum(reads))
        reads.clear()
        with open_engine(demo_model, tiers) as engine:
            second = run_workloads(engine)
        assert reads == []
        assert_identical(first, second)
        process.kill()
        process.wait()
        with open_engine(demo_model, tiers) as engine:
            third = run_workloads(engine)
        assert sum(reads) == arena.published, "nobody keeps them any more"
        assert_identical(first, third)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
