"""Arena process and engines killed at random moments: what engines are given is right, and what was there stays."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults.builds import SIZES

from support.checkpoints import write_checkpoint
from support.verbatim import VerbatimEncoder
from ziggurat.allocators.arena import HostArena
from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.shared import process
from ziggurat.allocators.shared.arena import attach_arena
from ziggurat.allocators.shared.errors import SharedArenaError
from ziggurat.allocators.shared.lease import ask_status
from ziggurat.allocators.shared.messages import ArenaStatus, Attach
from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.ledger import arena_key, open_ledger
from ziggurat.residency.policies.registry import make_policy
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.pack import Pack
from ziggurat.stores.readers.registry import open_reader

PLACES = 7  # of the pack's 12 rows, so that rows come and go all the time
AT_ONCE = 3
DEADLINE = 60.0
_DONE, _ADOPTED, _FREE, _HELD, _OWN, _WRONG = range(6)  # words that an engine writes and the driver reads


@dataclass
class Life:
    """A child process and a page that it shares with the driver."""

    work: Callable[[memoryview], None]
    page: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, mmap.PAGESIZE))
    pid: int = 0

    def start(self) -> Life:
        self.words = memoryview(self.page).cast("Q")
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.work(self.words)
                code = 0
            finally:
                os._exit(code)
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for something that this process does. AssertionError if it ends, or takes a minute."""
        begun = time.monotonic()
        while not done():
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                self.pid = 0
                raise AssertionError(f"{what}: the process ended (wrong rows: {self.words[_WRONG]})")
            assert time.monotonic() - begun < DEADLINE, f"{what}: not within {DEADLINE} s"
            time.sleep(0.001)


def run(seed: int, count: int, work: Path) -> dict[str, object]:
    """Kill `count` times, an engine or the arena process, and look at what is left. AssertionError names the number.

    Returns counts. Must run in a process without threads, since it forks.
    """
    write_checkpoint(work / "model", **SIZES)
    with Checkpoint.open(work / "model") as checkpoint:
        (path,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), work / "packs", lanes=1)
    pack = Pack.open(path)
    key, start = arena_key(pack.header), pack._data_start
    stride, total = pack.header.stride, pack.header.rows
    pack.close()
    raw = path.read_bytes()
    rows = [raw[start + i * stride : start + (i + 1) * stride] for i in range(total)]
    socket = work / "socket"
    done: Counter[str] = Counter()
    rig = _Rig(socket, path, key, rows)
    try:
        for number in range(count):
            try:
                rig.round(random.Random(f"{seed} {number}"), done)
            except AssertionError as error:
                raise AssertionError(f"kill {number} of seed {seed}: {error}") from error
    finally:
        rig.end()
    return {"kills": count, "seed": seed, "steps": rig.steps, "ends": dict(sorted(done.items()))}


class _Rig:
    """One arena process, an engine, and sometimes a second one that reads."""

    def __init__(self, socket: Path, path: Path, key: str, rows: list[bytes]) -> None:
        self.socket, self.path, self.key, self.rows = socket, path, key, rows
        self.keeper: Life | None = None
        self.engines: list[Life] = []
        self.left = 0  # rows that the arena process had when there was no engine any more
        self.steps = 0

    def round(self, dice: random.Random, done: Counter[str]) -> None:
        """Let everything run for a random while, kill something, and see that the rest is as it should be."""
        if self.keeper is None:
            self.keeper = Life(lambda words: self._keep()).start()
            self.keeper.until(lambda: self._status() is not None, "the arena process starts")
            self.left = 0
        if not self.engines:
            self._start(dice)
            # What the last engine left is there, all of it, or the next one is killed before it could tell.
            if dice.random() < 0.8:
                self._ready(self.engines[0])
                found = self.engines[0].words[_ADOPTED]
                assert found == self.left, f"{found} of {self.left} rows were found again"
                assert found + self.engines[0].words[_FREE] == PLACES, "places are missing"
                if dice.random() < 0.4:
                    self._start(dice)
        elif len(self.engines) == 1 and dice.random() < 0.4:
            self._start(dice)  # the writer, if the other one is a reader that is left over
        time.sleep(dice.random() ** 2 * 0.06)
        victim = dice.choice(["engine", "engine", "engine", "keeper", "keeper ended"])
        done[victim if len(self.engines) == 1 else f"{victim} of two engines"] += 1
        if victim == "engine":
            self._kill_engine(self.engines.pop(dice.randrange(len(self.engines))))
        else:
            self.keeper.kill(signal.SIGTERM if victim == "keeper ended" else signal.SIGKILL)
            self.keeper = None
            self._go_on_without(dice, done)

    def _kill_engine(self, engine: Life) -> None:
        held = engine.words[_HELD]
        engine.kill()
        self._account(engine)
        for other in self.engines:
            self._more(other, 5)
        if self.engines:
            return
        keeper = self.keeper
        assert keeper is not None
        keeper.until(lambda: (arena := self._arena()) is None or arena.idle, "the lease ends")
        arena = self._arena()
        self.left = 0 if arena is None else arena.published
        assert self.left >= held - AT_ONCE, f"{self.left} rows left of {held}"
        assert arena is None or arena.lost == 0, f"{arena} has places that nobody can use"

    def _go_on_without(self, dice: random.Random, done: Counter[str]) -> None:
        """Engines serve as before, a new one has an arena of its own."""
        for engine in self.engines:
            self._more(engine, 20)
        if dice.random() < 0.3:
            self._start(dice)
            self._more(self.engines[-1], 20)
            assert self.engines[-1].words[_OWN] == 1
            done["engine without an arena process"] += 1
        while self.engines:
            engine = self.engines.pop()
            engine.kill()
            self._account(engine)

    def _keep(self) -> None:
        """In a child: the arena process, without what it says."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        process.main([str(self.socket), "--limit", str(1 << 30)])

    def _start(self, dice: random.Random) -> None:
        seed, reader = dice.getrandbits(32), dice.choice(["pread", "io_uring"])
        self.engines.append(Life(lambda words: self._engine(words, seed, reader)).start())

    def _ready(self, engine: Life) -> None:
        engine.until(lambda: engine.words[_DONE] > 0, "an engine starts")

    def _more(self, engine: Life, steps: int) -> None:
        wanted = engine.words[_DONE] + steps
        engine.until(lambda: engine.words[_DONE] >= wanted, "an engine goes on")

    def _account(self, engine: Life) -> None:
        assert engine.words[_WRONG] == 0, f"{engine.words[_WRONG]} rows had wrong bytes"
        self.steps += engine.words[_DONE]

    def _status(self) -> tuple[ArenaStatus, ...] | None:
        try:
            return ask_status(self.socket).arenas
        except SharedArenaError:
            return None

    def _arena(self) -> ArenaStatus | None:
        return next((one for one in self._status() or () if one.key == self.key), None)

    def _engine(self, words: memoryview, seed: int, reader: str) -> None:
        """In a child: look at what is there, then read at random, and compare every byte."""
        dice = random.Random(seed)
        pack = Pack.open(self.path, reader=open_reader(reader, self.path, threads=2))
        header = pack.header
        arena: HostArena
        try:
            arena = attach_arena(self.socket, Attach(self.key, "test", PLACES, header.stride), AT_ONCE)
        except SharedArenaError:
            words[_OWN] = 1
            arena = PageableArena(PLACES + AT_ONCE, header.stride)
        cache = HostCache(
            pack,
            arena,
            make_policy("lru"),
            experts=header.experts,
            staging=AT_ONCE,
            ledger=open_ledger(arena, pack, "never"),
        )
        words[_ADOPTED], words[_FREE] = cache.adopted, len(cache._free)
        self._check(words, cache, [key for key in range(header.rows) if cache.holds(key)])
        words[_DONE] += 1
        while True:
            keys = dice.sample(range(header.rows), dice.randint(1, AT_ONCE))
            self._check(words, cache, keys)
            words[_HELD] = cache.used
            words[_DONE] += 1

    def _check(self, words: memoryview, cache: HostCache, keys: list[int]) -> None:
        epoch = cache.open_epoch()
        for batch in cache.rows(dict.fromkeys(keys, 1.0), epoch=epoch):
            for row in batch.rows:
                if row.row.numpy().tobytes() != self.rows[row.key]:
                    words[_WRONG] += 1
            assert not batch.faults, batch.faults
            cache.settle(batch)
        cache.close_epoch(epoch)

    def end(self) -> None:
        for one in [*self.engines, *([] if self.keeper is None else [self.keeper])]:
            if one.pid:
                one.kill()
