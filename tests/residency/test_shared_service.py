"""A service whose arena is kept by another process: restarts, several engines, and what happens without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.budgets import FACTS, STRIDE, check_of
from support.budgets import config as budget_config
from support.budgets import machine as budget_machine
from support.cuda_fakes import FakeLocker
from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, open_tiers, tiers
from support.keepers import keeper, settled, start_keeper
from support.wrapped_packs import WrappedPack
from ziggurat.allocators import lockers
from ziggurat.allocators.errors import PageLockError
from ziggurat.allocators.lockers import LockRefusedError
from ziggurat.allocators.shared.arena import attach_arena
from ziggurat.allocators.shared.messages import Attach
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.budget import plan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import BudgetError, ConfigError
from ziggurat.residency.factory import open_service
from ziggurat.residency.ledger import arena_key
from ziggurat.residency.metric_specs import SHARES
from ziggurat.residency.placement import Placement, open_shared_arena
from ziggurat.residency.service import ExpertService

ROWS = 48


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    with keeper(tmp_path / "socket"):
        yield tmp_path / "socket"


def opened(
    packs: FakePacks, socket: Path, host: str = "100%", heat: Path | None = None
) -> tuple[ExpertService, WrappedPack]:
    """A started service and the log of its reads."""
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs.paths[0].parent), "readers": 2},
                "host": {"size": host, "share": str(socket)},
                "device": {"size": "25%"},
            },
            "heat": {"path": None if heat is None else str(heat)},
        }
    )
    pack = WrappedPack(packs.open())
    service = open_service(config, packs.geometry, pack, get_codec(packs.codec))
    service.warm_start()
    return service, pack


def role(service: ExpertService) -> str | None:
    """What the metrics say that it is."""
    shown = [one for one in SHARES if service.metrics.value("ziggurat_arena_share_ratio", one)]
    assert len(shown) <= 1
    return shown[0] if shown else None


def serve(packs: FakePacks, model: FakeModel, service: ExpertService, steps: int = 3) -> None:
    run = Passes(model, service)
    for seed in range(steps):
        x = model.inputs(2, seed=seed)
        assert bits_equal(run.step(x).value, packs.reference(model, x))


# -- restart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_heat", [False, True])
def test_a_restarted_engine_serves_without_reading_the_pack(
    packs: FakePacks, model: FakeModel, socket: Path, tmp_path: Path, with_heat: bool
) -> None:
    heat = tmp_path / "heat" if with_heat else None
    first, pack = opened(packs, socket, heat=heat)
    serve(packs, model, first, 12)
    assert first.cache.fill([(key, 0.0) for key in range(ROWS)], ROWS).read + len(set(pack.log)) >= ROWS
    assert first.cache.used == ROWS
    first.close()
    second, pack = opened(packs, socket, heat=heat)
    assert second.metrics.value("ziggurat_arena_adopted_rows") == ROWS
    serve(packs, model, second, 12)
    second.preheated()
    assert pack.log == []
    assert role(second) == "writer"
    second.close()


def test_a_restarted_engine_whose_layers_fetch_their_own_rows(
    packs: FakePacks, model: FakeModel, socket: Path
) -> None:
    header = packs.open().header
    for engine in range(2):
        pack = WrappedPack(packs.open())
        arena = attach_arena(socket, Attach(arena_key(header), "test", ROWS, header.stride), 2)
        service = open_tiers(packs, slots=12, inline=True, arena=arena, pack=pack)
        service.warm_start()
        service.preheated()
        assert service.choice.serving == "inline"
        serve(packs, model, service, 8)
        assert (len(pack.log) == 0) == (engine == 1)
        service.close()


def test_rows_that_come_and_go_in_a_shared_arena(packs: FakePacks, model: FakeModel, socket: Path) -> None:
    header = packs.open().header
    for engine in range(3):
        pack = WrappedPack(packs.open())
        arena = attach_arena(socket, Attach(arena_key(header), "test", ROWS, header.stride), 2)
        service = open_tiers(packs, slots=12, inline=True, arena=arena, pack=pack)
        assert (service.cache.adopted > 0) == (engine > 0)
        with service.churn(seed=engine):
            serve(packs, model, service, 8)
        with service.paused():  # a thread may still be reading what lost its slot
            service.cache.check()
        service.close()


def test_two_engines_whose_layers_fetch_their_own_rows(
    packs: FakePacks, model: FakeModel, socket: Path
) -> None:
    """The second reads the rows of the first in place, while that brings and would like to evict others."""
    header = packs.open().header

    def engine(places: int) -> tuple[ExpertService, WrappedPack]:
        pack = WrappedPack(packs.open())
        arena = attach_arena(socket, Attach(arena_key(header), "test", places, header.stride), 2)
        return open_tiers(packs, slots=12, inline=True, arena=arena, pack=pack), pack

    (writer, _), places = engine(20), 20
    serve(packs, model, writer, 4)
    reader, _ = engine(places)
    adopted = reader.cache.adopted
    assert adopted == writer.cache.used > 0
    done = threading.Event()

    def work() -> None:
        serve(packs, model, writer, 12)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    serve(packs, model, reader, 12)
    thread.join()
    assert done.is_set()
    evicted = writer.cache.evictions
    serve(packs, model, writer, 4)
    assert writer.cache.evictions == evicted, "nothing leaves while the reader is there"
    reader.close()
    writer.close()


# -- without the process -------------------------------------------------------------------------------------------


def test_without_a_process_an_engine_has_its_own_arena(
    packs: FakePacks, model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, _ = opened(packs, tmp_path / "nobody")
    assert role(service) == "own"
    assert "this engine has an arena of its own" in caplog.text
    serve(packs, model, service)
    service.close()


def test_one_that_refuses_is_done_without_as_well(
    packs: FakePacks, model: FakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with keeper(tmp_path / "small", limit=4096):
        service, _ = opened(packs, tmp_path / "small")
        assert role(service) == "own"
        assert "raise its --limit" in caplog.text
        serve(packs, model, service)
        service.close()


def test_an_engine_goes_on_when_the_process_is_killed_and_the_next_one_starts_anew(
    packs: FakePacks, model: FakeModel, tmp_path: Path
) -> None:
    process = start_keeper(tmp_path / "socket")
    service, _ = opened(packs, tmp_path / "socket")
    assert role(service) == "writer"
    serve(packs, model, service)
    process.kill()
    process.wait()
    settled(lambda: role(service) == "orphan")
    serve(packs, model, service, 8)
    other, _ = opened(packs, tmp_path / "socket")
    assert role(other) == "own"
    serve(packs, model, other)
    other.close()
    service.close()


def test_nobody_asks_for_it_by_default(packs: FakePacks) -> None:
    assert TiersConfig.from_mapping({"tiers": {"disk": {"path": "packs"}}}).tiers.host.share is None
    with tiers(packs, slots=12) as service:
        assert role(service) is None
        assert service.metrics.value("ziggurat_arena_adopted_rows") == 0


# -- for a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refuses", [False, True])
def test_a_gpu_gets_the_shared_memory_locked(
    packs: FakePacks, socket: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """With a driver that only writes down what it is asked to lock: each kind of memory by itself."""
    ranges: list[tuple[int, int]] = []

    class Locker(FakeLocker):
        def lock(self, address: int, nbytes: int) -> int | None:
            if refuses:
                raise LockRefusedError("no", "try again")
            ranges.append((address, nbytes))
            return super().lock(address, nbytes)

    monkeypatch.setattr(lockers, "CudaLocker", lambda device: Locker())
    header = packs.open().header

    def gpu_arena(on_limit: str) -> Any:
        place = Placement(torch.device("cuda:0"))
        return open_shared_arena(place, socket, header, 6, 2, kind="pinned", numa="none", on_limit=on_limit)

    if refuses:
        with pytest.raises(PageLockError):
            gpu_arena("refuse")
        arena = gpu_arena("pageable")
        assert (arena.kind, arena.device_pointer, arena.share.role) == ("pageable", None, "writer")
    else:
        arena = gpu_arena("refuse")
        start = arena.tensor.data_ptr()
        assert arena.kind == "pinned"
        assert sorted(ranges) == [(start, 2 * header.stride), (start + 2 * header.stride, 6 * header.stride)]
        reader = gpu_arena("refuse")
        assert (reader.share.role, reader.kind) == ("reader", "pinned")
        assert not reader.view(3).readonly, "a driver locks pages for writing"
        reader.close()
    arena.close()


# -- the rest of a restart -----------------------------------------------------------------------------------------


def test_tokens_are_served_while_the_arena_is_being_filled(
    packs: FakePacks, model: FakeModel, socket: Path, tmp_path: Path
) -> None:
    """Preheating goes by heat, says how far it is, and is waited for by nobody."""
    first, _ = opened(packs, socket, heat=tmp_path)
    serve(packs, model, first, 12)
    ranked, kept = [key for key, _ in first.heat.order()], first.heat.counts.copy()
    seeds = [seed for seed in range(40) if not used_by(model, first, seed) & set(ranked[12:14])][:3]
    assert len(seeds) == 3
    first.heat.counts[:] = kept
    first.close()
    gate, reading = threading.Event(), threading.Event()
    pack = WrappedPack(packs.open())

    def before(key: int) -> None:
        if threading.current_thread().name == "ziggurat-preheat":
            reading.set()
            gate.wait()

    pack.before = before
    config = TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs.paths[0].parent), "readers": 2},
                "host": {"size": "100%"},
                "device": {"size": "25%"},
            },
            "heat": {"path": str(tmp_path)},
        }
    )
    service = open_service(config, packs.geometry, pack, get_codec(packs.codec))
    start = service.warm_start()
    assert start.heat.done
    assert reading.wait(10)
    left = service.metrics.value("ziggurat_preheat_rows")
    assert left == ROWS - 12, "those of the pool are there"
    run = Passes(model, service)
    for seed in seeds:
        x = model.inputs(1, seed=seed)
        assert bits_equal(run.step(x).value, packs.reference(model, x))
    assert service.metrics.value("ziggurat_preheat_rows") == left, "and none of it had been preheated"
    gate.set()
    service.preheated()
    assert service.metrics.value("ziggurat_preheat_rows") == 0
    background = [key for key in pack.log if key in ranked[12:]]
    assert background[:2] == ranked[12:14], "hottest first, behind those of the pool"
    service.close()


def used_by(model: FakeModel, service: ExpertService, seed: int) -> set[int]:
    """Keys that one step routes to."""
    service.heat.counts[:] = 0.0
    Passes(model, service).step(model.inputs(1, seed=seed))
    return {key for key, _ in service.heat.order()}


# -- the plan ------------------------------------------------------------------------------------------------------


def shared(room: int | None, host: Any = "10%", **limits: Any) -> Any:
    config = budget_config(host=host, host_extra={"share": "/run/ziggurat.sock"})
    return plan(config, FACTS, 5000, machine=budget_machine(arena_room=room, **limits))


def test_the_plan_counts_the_arena_against_its_process() -> None:
    result = shared(64 << 20)
    (rank,) = result.ranks
    assert (result.arena_shared, rank.arena_rows, rank.staging_bytes) == (True, 19, 8 * STRIDE)
    check = check_of(result, "arena process")
    assert (check.needed, check.have, check.ok) == (19 * STRIDE, 64 << 20, True)
    own = shared(None)
    assert not own.arena_shared
    memory = [check_of(one, "host memory").needed for one in (result, own)]
    assert memory[1] - memory[0] == 19 * STRIDE - rank.staging_bytes
    assert any("no arena process at /run/ziggurat.sock" in note for note in own.notes)
    assert "arena process" not in {one.name for one in own.checks}


def test_a_process_without_room_is_named() -> None:
    with pytest.raises(BudgetError, match=r"arena process: needs .* short by .*ziggurat arena"):
        shared(10 * STRIDE).require()
    assert shared(10 * STRIDE, host="auto").ranks[0].arena_rows == 10
    assert shared(64 << 20, memory_available=(256 << 20) + 80 * STRIDE).ok, "the engine needs none of it"


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ({"shared": "/run/x"}, 'did you mean "tiers.host.share"'),
        ({"share": ""}, "not empty"),
        ({"share": True}, "expected a path"),
        ({"share": ["/run/x"]}, "expected a path"),
    ],
)
def test_mistakes_in_the_configuration(written: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TiersConfig.from_mapping({"tiers": {"disk": {"path": "packs"}, "host": written}})
