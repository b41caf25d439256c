"""A host cache over memory that outlives it: rows that are there are found and believed only if they are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from support.fake_moe import FakePacks
from support.keepers import keeper, settled
from support.wrapped_packs import WrappedPack
from ziggurat.allocators.shared.arena import SharedArena, attach_arena
from ziggurat.allocators.shared.messages import Attach
from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.ledger import arena_key, arena_label, open_ledger
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.runtime_errors import HostCacheError
from ziggurat.stores.pack import Pack

ROWS = 48


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    with keeper(tmp_path / "socket"):
        yield tmp_path / "socket"


class Engine:
    """A cache, in the way a service makes it. log: keys that were read from the pack."""

    def __init__(
        self,
        packs: FakePacks,
        socket: Path,
        places: int = 8,
        *,
        private: int = 2,
        verify: Literal["always", "first-read", "never"] = "first-read",
        inline: bool = False,
        known: bool = True,
    ) -> None:
        self.inner = packs.open()
        self.pack = WrappedPack(self.inner)
        if known:
            self.pack.checksums = self.inner.checksums  # type: ignore[attr-defined]
        header = self.inner.header
        want = Attach(arena_key(header), arena_label(header), places, header.stride)
        self.arena: SharedArena = attach_arena(socket, want, private)
        kind = InlineCache if inline else HostCache
        self.cache = kind(
            self.pack,
            self.arena,
            make_policy("lru"),
            experts=header.experts,
            staging=private,
            ledger=open_ledger(self.arena, self.pack, verify),
        )

    @property
    def log(self) -> list[int]:
        return self.pack.log

    def get(self, *keys: int, weight: float = 1.0) -> dict[int, bytes]:
        """Rows, settled, with their bytes."""
        epoch = self.cache.open_epoch()
        found = {}
        for batch in self.cache.rows(dict.fromkeys(keys, weight), epoch=epoch):
            assert not batch.faults
            found.update({row.key: row.row.numpy().tobytes() for row in batch.rows})
            self.cache.settle(batch)
        self.cache.close_epoch(epoch)
        return found

    def held(self) -> set[int]:
        return {key for key in range(ROWS) if self.cache.holds(key)}

    def close(self) -> None:
        self.cache.check()
        self.arena.close()
        self.inner.close()


@pytest.fixture(scope="module")
def bytes_of(packs: FakePacks) -> list[bytes]:
    """The bytes of every row, padding included."""
    with packs.paths[0].open("rb") as file:
        pack = Pack.open(packs.paths[0])
        file.seek(pack._data_start)
        stride = pack.header.stride
        rows = [file.read(stride) for _ in range(ROWS)]
        pack.close()
    return rows


# -- restart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_the_next_engine_reads_nothing_again(
    packs: FakePacks, socket: Path, bytes_of: list[bytes], inline: bool, known: bool
) -> None:
    first = Engine(packs, socket, inline=inline, known=known)
    assert first.cache.adopted == 0
    first.get(3, 7, 11, 40)
    first.close()
    second = Engine(packs, socket, inline=inline, known=known)
    assert (second.cache.adopted, second.held()) == (4, {3, 7, 11, 40})
    assert second.get(7, 40) == {key: bytes_of[key] for key in (7, 40)}
    assert second.log == []
    assert second.get(5) == {5: bytes_of[5]}
    assert second.log == [5]
    second.close()


def test_evicted_rows_are_not_found_again(packs: FakePacks, socket: Path, bytes_of: list[bytes]) -> None:
    first = Engine(packs, socket, places=3)
    for key in range(6):
        first.get(key)
    held = first.held()
    assert held == {3, 4, 5}
    first.close()
    second = Engine(packs, socket, places=3)
    assert second.held() == held
    assert second.get(4, 9) == {key: bytes_of[key] for key in (4, 9)}
    second.close()


def test_adopted_rows_are_ranked_by_heat(packs: FakePacks, socket: Path) -> None:
    first = Engine(packs, socket, places=3)
    first.get(1, 2, 3)
    first.close()
    second = Engine(packs, socket, places=3)
    second.cache.rank(lambda key: {1: 5.0, 2: 1.0, 3: 9.0}[key])
    second.get(20)
    assert second.held() == {1, 3, 20}, "the coldest has left"
    second.close()


def test_rows_of_another_pack_have_another_arena(packs: FakePacks, packs_w2: FakePacks, socket: Path) -> None:
    first = Engine(packs, socket)
    first.get(1)
    other = Engine(packs_w2, socket)
    assert (other.arena.share.role, other.held()) == ("writer", set())
    header = first.inner.header
    for change in ({"identity": "f" * 64}, {"codec_version": "9"}, {"tp_rank": 1, "tp_size": 2}):
        values = {**header.__dict__, **change}
        assert arena_key(type(header)(**values)) != arena_key(header)
    first.close()
    other.close()


# -- what is believed ----------------------------------------------------------------------------------------------


def spoil(engine: Engine, key: int) -> None:
    """As if somebody had written past his own memory."""
    engine.arena.view(engine.cache._place_of[key])[100] ^= 1


def test_damaged_rows_are_left_out_and_read_again(
    packs: FakePacks, socket: Path, bytes_of: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    first = Engine(packs, socket)
    first.get(3, 7, 11)
    spoil(first, 7)
    first.close()
    second = Engine(packs, socket)
    assert second.held() == {3, 11}
    assert "1 rows of the shared arena are not those of the pack" in caplog.text
    assert second.get(3, 7, 11) == {key: bytes_of[key] for key in (3, 7, 11)}
    assert second.log == [7]
    second.close()


def test_nothing_is_looked_at_if_nothing_is_to_be_verified(packs: FakePacks, socket: Path) -> None:
    first = Engine(packs, socket)
    first.get(3, 7)
    spoil(first, 7)
    first.close()
    second = Engine(packs, socket, verify="never")
    assert second.held() == {3, 7}
    second.close()


@pytest.mark.parametrize("tag", [ROWS, 1 << 40])
def test_rows_that_the_pack_does_not_have_are_left_out(packs: FakePacks, socket: Path, tag: int) -> None:
    first = Engine(packs, socket)
    first.get(3)
    share = first.arena.share
    share.publish(9, tag, 5)
    share.publish(8, 4, 5)  # a row of the pack, with another checksum
    twice = int(first.inner.checksums.flat[3])
    share.publish(7, 3, twice)
    first.arena.view(7)[:] = first.arena.view(first.cache._place_of[3])
    first.arena.close()
    second = Engine(packs, socket)
    assert second.held() == {3}
    assert len(second.cache._free) == 7, "their places are free again"
    second.close()
    first.inner.close()


def test_a_read_that_fails_leaves_its_place_free(packs: FakePacks, socket: Path) -> None:
    first = Engine(packs, socket)
    first.pack.failing = {5: "io", 6: "checksum"}
    epoch = first.cache.open_epoch()
    batches = list(first.cache.rows({4: 1.0, 5: 1.0, 6: 1.0}, epoch=epoch))
    first.cache.close_epoch(epoch)
    assert {fault.key for batch in batches for fault in batch.faults} == {5, 6}
    assert len(first.arena.share.free()) == 7
    first.close()
    second = Engine(packs, socket)
    assert second.held() == {4}
    second.close()


def test_a_row_on_its_way_is_not_published(packs: FakePacks, socket: Path) -> None:
    first = Engine(packs, socket)
    seen: list[tuple[list[int], int]] = []
    first.pack.before = lambda key: seen.append(
        ([tag for _, tag, _ in first.arena.share.published()], len(first.arena.share.free()))
    )
    first.get(5, 6)
    assert seen[0] == ([], 6), "two places are being filled"
    assert {tag for _, tag, _ in first.arena.share.published()} == {5, 6}
    first.close()


# -- two engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [False, True])
def test_a_second_engine_uses_the_rows_of_the_first(
    packs: FakePacks, socket: Path, bytes_of: list[bytes], inline: bool
) -> None:
    writer = Engine(packs, socket)
    writer.get(1, 2, 3)
    reader = Engine(packs, socket, inline=inline)
    assert (reader.arena.share.role, reader.cache.adopted) == ("reader", 3)
    assert reader.get(2, 3) == {key: bytes_of[key] for key in (2, 3)}
    assert reader.log == []
    assert reader.get(9) == {9: bytes_of[9]}, "through a place of its own"
    assert not reader.cache.holds(9)
    writer.get(9)
    assert reader.get(9, 1) == {key: bytes_of[key] for key in (9, 1)}
    assert reader.log == [9], "the writer has it by now"
    assert reader.cache.fill([(key, 1.0) for key in range(ROWS)], 4).full
    if isinstance(reader.cache, InlineCache):
        shown: list[int] = []
        reader.cache.close_epoch(reader.cache.launch(lambda places, version: shown.extend(places.tolist())))
        assert {key for key, place in enumerate(shown) if place >= 0} == {1, 2, 3, 9}
        assert reader.cache.retire([1, 2]) == 0
        assert reader.cache.promote([(20, 9.0)], lambda key: 0.0, 1).full
    reader.close()
    writer.close()


@pytest.mark.parametrize("inline", [False, True])
def test_what_a_reader_sees_stays_where_it_is(
    packs: FakePacks, socket: Path, bytes_of: list[bytes], inline: bool
) -> None:
    writer = Engine(packs, socket, places=3, inline=inline)
    writer.get(1, 2, 3)
    reader = Engine(packs, socket, places=3)
    assert writer.get(10, 11) == {key: bytes_of[key] for key in (10, 11)}, "through staging"
    assert writer.held() == {1, 2, 3}
    assert reader.get(1, 2, 3) == {key: bytes_of[key] for key in (1, 2, 3)}
    reader.close()
    settled(lambda: not writer.arena.share.frozen)
    writer.get(13)
    assert writer.cache.holds(13), "after it has left, rows may go again"
    writer.close()


def test_layers_that_are_read_in_place_keep_their_rows_over_a_restart(packs: FakePacks, socket: Path) -> None:
    first = Engine(packs, socket, places=16)
    direct = list(range(12))
    first.get(20, 21, 22, 23, 24, 25, 26, 27)
    first.get(*range(4))
    first.close()
    second = Engine(packs, socket, places=16)
    assert len(second.cache.fix(direct)) == 12
    assert sorted(second.log) == list(range(4, 12)), "four were there, others made room"
    assert set(direct) <= second.held()
    for key in range(30, 40):
        second.get(key)
    assert set(direct) <= second.held()
    second.close()
    third = Engine(packs, socket, places=16)
    third.cache.fix(direct)
    assert third.log == []
    reader = Engine(packs, socket, places=16)
    assert reader.cache.fix(direct) == {key: third.cache._place_of[key] for key in direct}
    with pytest.raises(HostCacheError, match="want a place for good"):
        reader.cache.fix(range(12, ROWS))
    reader.arena.close()
    third.close()


# -- at random -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_engines_come_and_go_at_random(
    packs: FakePacks, socket: Path, bytes_of: list[bytes], seed: int
) -> None:
    """Every row that anybody is given has the right bytes, whoever put it there, and all places have one role."""
    dice = random.Random(seed)
    engines: list[Engine] = []
    reads = 0
    for _ in range(150):
        roll = dice.random()
        if not engines or (roll < 0.1 and len(engines) < 3):
            engines.append(Engine(packs, socket, places=10, inline=dice.random() < 0.5))
        elif roll < 0.2:
            left = engines.pop(dice.randrange(len(engines)))
            reads += len(left.log)
            left.close()
        else:
            engine = dice.choice(engines)
            keys = dice.sample(range(ROWS), dice.randint(1, 2))
            got = engine.get(*keys, weight=dice.choice([0.0, 1.0]))
            assert got == {key: bytes_of[key] for key in keys}
    for engine in engines:
        engine.close()
    assert reads < 300


def test_a_directory_without_news_is_not_read_through(
    packs: FakePacks, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(packs, socket)
    engine.get(1)
    looked: list[int] = []
    real = engine.arena.share.published

    def published() -> Iterator[tuple[int, int, int]]:
        looked.append(1)
        return real()

    monkeypatch.setattr(engine.arena.share, "published", published)
    for _ in range(3):
        engine.get(1)
    assert len(looked) <= 1, "once for what it has published itself"
    engine.close()
