"""The service: what a model runner talks to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ziggurat.allocators.errors import AllocatorError
from ziggurat.allocators.pageable import PageableArena
from ziggurat.kernels.cpu import moe as cpu_ops
from ziggurat.residency.account import Account
from ziggurat.residency.ahead import ReadingAhead
from ziggurat.residency.background import LEAVE_SECONDS
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.consensus import Consensus, NoConsensus
from ziggurat.residency.describe import describe_service
from ziggurat.residency.device_layer import DeviceLayers
from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.direct_layers import open_direct
from ziggurat.residency.errors import ResidencyError
from ziggurat.residency.fetch import Entry, Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.geometry_check import check_geometry
from ziggurat.residency.heat import HeatMap, HeatNote, heat_file, load_heat, save_heat
from ziggurat.residency.host_cache import HostCache, RowFault
from ziggurat.residency.host_policy import host_policy
from ziggurat.residency.inline.ahead import LookingAhead
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.choice import MappedArena, check_lookahead, choose
from ziggurat.residency.inline.churn import ArenaChurn
from ziggurat.residency.inline.layers import InlineLayers
from ziggurat.residency.inline.parts import Hooks, Inline
from ziggurat.residency.late_books import LateBooks
from ziggurat.residency.layer import LayerRunner
from ziggurat.residency.ledger import open_ledger
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.passes import (
    PassMode,
    PassPath,
    PassState,
    RowFailure,
    StepResult,
    StepState,
    StepTokens,
)
from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.registry import make_policy
from ziggurat.residency.ports import ExpertOps, LayerKernels, RowArena, RowCodec, RowPack, RowPool
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.slots import SlotPool, SlotTable, slot_order
from ziggurat.residency.step import MissSettings, StepRunner
from ziggurat.residency.step_clock import StepClock
from ziggurat.residency.streaming.layers import StreamedLayers
from ziggurat.residency.streaming.ring import StagingRing

__all__ = [
    "ExpertService",
    "PassPath",
    "RowFailure",
    "ServiceGeometry",
    "StepResult",
    "StepTokens",
    "WarmStart",
]

T = TypeVar("T")
logger = logging.getLogger(__name__)

_SERVED = {"host": "by the host", "inline": "inline, by the device", "replay": "by replay"}
_MOST_LATE = 32  # copies of counts that may wait for a thread that gets no time


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a start loaded. pool_rows: rows put into slots. arena_rows: rows the background thread will try to fill.

    heat: whether a heat file was read, or why not. faults: rows that could not be read; they are tried again when
    somebody is routed to them.
    """

    pool_rows: int
    arena_rows: int
    heat: HeatNote
    faults: tuple[RowFault, ...] = ()


class ExpertService:
    """Serves the routed experts of one model on one rank through tiers.

    Outside `run_step` it is unarmed: `moe` answers zeros, reads nothing and counts only the call.

    pack, arena and pool belong to the service from here on and are closed with it. arena=None: no host cache, rows
    pass through a few pageable staging places. heat_folder=None: heat is neither read nor saved.
    kernels: runs layers where the pool is; None = the host computes them with `ops`, which needs a pool in host memory.
    ring: staging memory through which rows that only a prompt wants pass; the service's from here on.
    max_tokens: rows of the largest batch that `moe` is called with; ring and max_tokens are of interest with kernels.
    mapped: the arena as the device of the kernels sees it, so that layers can fetch rows by themselves; needs a ring.
    Layers without slots (`tiers.device.direct_layers`) are read there, too: HostCacheError if their rows cannot be.
    slot_seed: hand free slots out in a shuffled order (results do not depend on it; determinism tests use it).
    replay_enabled, consensus_enabled: switches of negative controls; False makes results wrong or ranks diverge.
    """

    def __init__(
        self,
        config: TiersConfig,
        geometry: ServiceGeometry,
        codec: RowCodec,
        pack: RowPack,
        pool: RowPool,
        arena: RowArena | None,
        *,
        consensus: Consensus,
        metrics: TierMetrics,
        ops: ExpertOps | None = None,
        kernels: LayerKernels | None = None,
        ring: StagingRing | None = None,
        max_tokens: int = 0,
        mapped: MappedArena | None = None,
        heat_folder: Path | None = None,
        slot_seed: int | None = None,
        replay_enabled: bool = True,
        consensus_enabled: bool = True,
    ) -> None:
        check_geometry(geometry, codec, pack, pool, consensus)
        readers = config.tiers.disk.readers
        if arena is None:
            arena = PageableArena(readers, pack.header.stride)
        if not consensus_enabled:
            consensus = NoConsensus(consensus.rank, consensus.size)
        self.geometry = geometry
        self.metrics = metrics
        self.heat = HeatMap(geometry.layers, geometry.experts)
        self._config = config
        self._pack = pack
        self._arena = arena
        self._ring = ring
        self._heat_key, self._heat_path = heat_file(pack.header, heat_folder)
        self._state: PassState | None = None
        self._in_step = False
        self._closed = False
        self._late_epoch: int | None = None  # of the step before, if its copies were not known to be complete
        self._steps = 0
        self._logged: set[str] = set()

        table = SlotTable(geometry.layers, geometry.experts, pool.slots, codec.name)
        eviction = config.policy.eviction
        known = PolicySettings(layers=geometry.layers, experts=geometry.experts)
        self.slots = SlotPool(pool, table, make_policy(eviction, known), slot_order(pool.slots, slot_seed))
        self.choice = choose(
            config.miss.mode,
            mapped,
            on_host=kernels is None,
            caches=arena.places > readers or arena.places >= geometry.rows,
            whole_pool=pool.slots >= geometry.rows,
            consensus=consensus,
        )
        check_lookahead(config.miss.lookahead, self.choice, whole_pool=pool.slots >= geometry.rows)
        kind = InlineCache if self.choice.serving == "inline" else HostCache
        policy = host_policy(config.policy, geometry)
        ledger = open_ledger(arena, pack, config.tiers.disk.verify)
        self.cache = kind(pack, arena, policy, experts=geometry.experts, staging=readers, ledger=ledger)
        self._fetcher = Fetcher(self.slots, self.cache)
        direct = open_direct(
            config.tiers.device.direct_layers, geometry, kernels, mapped, self.cache, pool.device
        )
        self._direct_keys: frozenset[int] = frozenset() if direct is None else direct.keys
        settings = MissSettings(
            PassMode.REPLAY if self.choice.serving == "replay" else PassMode.INLINE,
            config.miss.max_replays,
            config.miss.tolerance,
            replay_enabled,
        )
        self._inline: Inline | None = None
        self._layers: LayerRunner | DeviceLayers | InlineLayers
        self._runner: StepRunner
        if isinstance(self.cache, InlineCache):
            assert kernels is not None
            assert ring is not None
            assert mapped is not None
            assert mapped.view is not None
            self._inline = Inline(
                geometry,
                kernels,
                self.slots,
                self._fetcher,
                self.cache,
                mapped.view,
                ring,
                max_tokens,
                consensus,
                settings,
                self.heat,
                readers,
                Hooks(
                    self._arm,
                    self.collect,
                    lambda report: self._account.filled(report),
                    lambda report: self._account.filled(report, "pool"),
                ),
                direct,
                config.miss.lookahead > 0,
            )
            self._layers, self._runner = self._inline.layers, self._inline.runner
        else:
            if kernels is None:
                self._layers = LayerRunner(geometry, codec, ops or cpu_ops, self.slots, self._fetcher)
            else:
                state = DeviceState(geometry.layers, geometry.experts, max_tokens, pool.device)
                streamed = None
                if ring is not None:
                    streamed = StreamedLayers(geometry, kernels, pool, self._fetcher, state, ring, direct)
                self._layers = DeviceLayers(
                    geometry, kernels, self.slots, self._fetcher, state, streamed, direct
                )
            self._runner = StepRunner(
                geometry, self.slots, self._fetcher, consensus, settings, self._layers, self._arm
            )
        self.lookahead = LookingAhead(self._layers)  # whose guesses are fetched (`miss.lookahead`)
        self._account = Account(metrics, geometry, self.slots, self.cache, self._fetcher, self.heat)
        self._account.serving(self.choice.serving)
        self._account.sharing(ledger, wanted=config.tiers.host.share is not None, adopted=self.cache.adopted)
        self._account.direct(len(self._direct_keys))
        self._ahead = ReadingAhead(self.cache, self.slots, self.heat, self._account, batch=readers)
        self._fetcher.upcoming = self._ahead.upcoming
        if self._inline is not None:
            self._account.follow(self._inline.layers.counts)
        self._account.gauges(with_heat=True)
        if kernels is not None:
            logger.info("misses are served %s: %s", _SERVED[self.choice.serving], self.choice.reason)
        describe_service(metrics, config, geometry, pool.device)
        # Guards heat and what is booked late; held during a capture, it keeps that thread from asking the device.
        self._books = threading.RLock()
        self._late_books = LateBooks(self._book_late)
        self._heat_late = 0  # steps booked late since heat was saved
        self._policies_late = 0  # steps booked late that the policies have not been told of

    @property
    def complete(self) -> bool:
        """Whether it is settled that nothing can miss on any rank, so that prompts need not be told apart."""
        return self._runner.complete

    @property
    def mode(self) -> PassMode:
        """How the first pass of a step treats misses."""
        return self._runner.mode

    def moe(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Routed experts of one layer (index): x [T, H], weights and ids [T, k] -> [T, H] in x's dtype.

        Rows of padding (beyond the step's live tokens) come out as zeros. RoutingError if a shape does not fit the
        model; if an id of a live token is not an expert, here or at the end of the pass.
        """
        if self._state is None:
            self._account.unarmed_call()
            return self._layers.unarmed(layer, x, topk_weights, topk_ids)
        return self._layers.run(self._state, layer, x, topk_weights, topk_ids)

    def run_step(self, forward: Callable[[PassPath], T], tokens: StepTokens) -> StepResult[T]:
        """Run one step: `forward` is called once per pass, the same number of times on every rank.

        A row that cannot be read ends up in the result's failures, never as an exception. What `forward` raises
        goes through, and the service stays usable.
        """
        if self._closed or self._in_step:
            raise StepError("the service is closed" if self._closed else "a step is already running")
        tokens.check()
        self._late_books.raise_error()
        self._close_late_epoch()
        if self._runner.sure(tokens):
            self._in_step = True
            try:
                result = self._runner.run_sure(forward, tokens)
            finally:
                self._in_step = False
            self._book_later()
            return result
        self._in_step = True
        step = StepState(tokens, self.cache.open_epoch())
        clock = StepClock(lambda: self._fetcher.seconds)
        try:
            result = self._runner.run(clock.watch(forward), step)
            if not step.deferred:
                step.seconds = clock.parts()
        finally:
            self._in_step = False
            self._close_epoch(step.epoch)
        self._finish(step, result)
        return result

    def warm_start(self) -> WarmStart:
        """Load what earlier runs used most: the pool at once, the arena in the background.

        Everything is loaded when the pool has a slot for every expert. Otherwise the hottest rows of the heat file
        fill the pool and the next ones the arena; without heat (or with heat.warm_start off) tiers start cold.
        """
        note = HeatNote(False, "heat is switched off")
        if self._heat_path is not None:
            note = self._log(load_heat(self._heat_path, self._heat_key, self.heat))
        self.cache.rank(lambda key: float(self.heat.counts.flat[key]))
        ranked = self.heat.order() if self._config.heat.warm_start else []
        ranked = [(key, heat) for key, heat in ranked if key not in self._direct_keys]
        if self.slots.slots >= self.geometry.rows - len(self._direct_keys) or self._fills_arena:
            known = {key for key, _ in ranked} | self._direct_keys
            ranked += [(key, 0.0) for key in range(self.geometry.rows) if key not in known]
        hottest = dict(ranked[: self.slots.slots])
        self._take_slots()
        epoch = self.cache.open_epoch()
        try:
            outcome = self._fetcher.fetch(hottest, blocked=(), epoch=epoch, entry=Entry.SEED)
        finally:
            self._fetcher.drain()
            self.cache.close_epoch(epoch)
        # Rows that the pool has come last in the arena: they are wanted there only once they lose their slot.
        arena_order = [*ranked[self.slots.slots :], *ranked[: self.slots.slots]]
        if self._inline is not None:
            self._inline.hand_over()
        if self.slots.slots < self.geometry.rows and arena_order and self.cache.capacity:
            self._ahead.preheat(arena_order)
        else:
            arena_order = []
        self._account.fetches()
        self._account.gauges(with_heat=True)
        filling = min(len(arena_order), self.cache.capacity)
        return WarmStart(len(outcome.arrived), filling, note, tuple(outcome.faults))

    def resize(self, slots: int, *, slot_seed: int | None = None) -> None:
        """Go on with an empty pool that uses `slots` of its slots; the others stay allocated and are left alone.

        For tests that compare pools of several sizes under the same captured graphs. Every rank must call it.
        """
        if self._in_step:
            raise StepError("a pool cannot change its size within a step")
        self._close_late_epoch()
        self.collect()
        self.slots.restart(slots, slot_order(self.slots.pool.slots, slot_seed))
        if self._inline is not None:
            self._inline.hand_over()
        self._runner.forget()
        self._account.gauges(with_heat=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no background work is in progress or begins: for graph capture."""
        threads = self._ahead.threads
        if self._inline is not None:
            threads.append(self._inline.promoter)
        with self._books, ExitStack() as stack:
            for thread in threads:
                stack.enter_context(thread.paused())
            yield

    def churn(self, seed: int = 0, most: int = 4) -> AbstractContextManager[ArenaChurn]:
        """Inside, a thread evicts random rows from the arena and reads others into it, up to `most` of each whenever a
        pass begins: for tests of layers that fetch their own rows. Every rank must enter it, between steps; afterwards
        steps go on without taking it for granted that the arena has every row. StepError if misses are not served
        inline."""
        if self._inline is None:
            raise StepError(f"the arena is not read by the device: {self.choice.reason}")
        return self._inline.churn(seed, most)

    def preheated(self) -> None:
        """Wait until the background thread has filled the arena as far as it can."""
        self._ahead.preheated()

    def save_heat(self) -> HeatNote:
        """Write the heat file now. A disk that refuses it is logged once, and is no error."""
        self.collect()
        return self._save_heat()

    def collect(self, *, wait: bool = True) -> None:
        """Book what steps have counted on the device and nobody waited for; without `wait` what has arrived so far.

        A thread does it every now and then; so the metrics and the heat of such steps are behind by a moment.
        """
        with self._books:
            late = self._layers.collect(wait=wait)
            if late is not None:
                self._heat_late += late.steps
                self._policies_late += late.steps
                self.heat.add_steps(late.pairs, late.steps)
                self._account.late_steps(late)
                self._ahead.passed(late.steps)

    def _save_heat(self) -> HeatNote:
        if self._heat_path is None:
            return HeatNote(False, "heat is switched off")
        with self._books:
            heat, self._heat_late = self.heat.copy(), 0
        note = save_heat(self._heat_path, self._heat_key, heat)
        self.heat.seeded = heat.seeded
        return self._log(note)

    def close(self) -> None:
        """Join background work, save heat, close pack and arena. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ahead.close(LEAVE_SECONDS)
        self._late_books.close()
        self._give_up_device()
        if self._inline is not None:
            self._inline.promoter.close(LEAVE_SECONDS)
        self._save_heat()
        self._pack.close()  # ends the reads that threads still wait for
        self._ahead.close()
        if self._inline is not None:
            self._inline.promoter.close()
        self.cache.close()
        self._arena.close()
        if self._ring is not None:
            self._ring.close()
        self.slots.pool.close()

    @property
    def _fills_arena(self) -> bool:
        """Whether every row is to be in the arena, whatever heat knows: the device can fetch it from nowhere else."""
        return self._inline is not None and self.cache.capacity >= self.geometry.rows

    def _take_slots(self) -> None:
        """Have the slots back from the device, empty."""
        if self._inline is not None:
            self._close_late_epoch()
            self.collect()
            self.slots.restart(self.slots.slots, self.slots.order)

    def _log(self, note: HeatNote) -> HeatNote:
        if note.problem and note.reason not in self._logged:
            self._logged.add(note.reason)
            logger.warning("heat: %s", note.reason)
        return note

    def _arm(self, state: PassState | None) -> None:
        self._state = state

    def _finish(self, step: StepState, result: StepResult[T]) -> None:
        if step.deferred:
            self._book_later()
            return
        self._steps += 1
        with self._books:
            for route in step.routes:
                self.heat.add(route.layer, route.experts, route.pairs)
            self.heat.advance()
            passed, self._policies_late = 1 + self._policies_late, 0
            self._account.step(step, result)
        self.slots.policy.advance(passed)
        self.cache.advance(passed)
        self._ahead.passed(1)
        if self._steps % self._config.heat.save_every_steps == 0:
            self._save_heat()

    def _book_later(self) -> None:
        """After a step that nobody waited for."""
        self._late_books.nudge()
        if self._layers.late is not None and self._layers.late.copies > _MOST_LATE:
            self.collect(wait=False)

    def _book_late(self) -> bool:
        """In the thread: book what has arrived; whether something is left."""
        self.collect(wait=False)
        if self._heat_late >= self._config.heat.save_every_steps:
            self._save_heat()
        return self._layers.late is not None and self._layers.late.waiting

    def _close_epoch(self, epoch: int) -> None:
        """End a step's hold on the arena; with copies under way that is put off, so that nobody waits for them."""
        if self._fetcher.copying:
            self._late_epoch = epoch
        else:
            self.cache.close_epoch(epoch)

    def _close_late_epoch(self) -> None:
        if self._late_epoch is not None:
            self._fetcher.drain()
            self.cache.close_epoch(self._late_epoch)
            self._late_epoch = None

    def _give_up_device(self) -> None:
        """Before memory is given back: no copy is under way, and what was counted is booked. A device that failed
        cannot be waited for; what ended the process has been said already."""
        try:
            self._fetcher.drain()
            self._close_late_epoch()
            self.collect()
            if self._inline is not None and self._inline.layers.interrupted:
                self._inline.layers.recover()  # which waits for what may still read the arena
        except (RuntimeError, AllocatorError, ResidencyError) as error:
            logger.warning("the device did not finish its work: %s", error)
