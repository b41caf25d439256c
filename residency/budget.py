"""The budget: what each tier takes and whether this machine can give it, before anything is allocated.

`plan()` is a pure function of a configuration, the model's shape, the bytes of a row and the machine's limits
as plain numbers. It always returns a Plan; `Plan.require()` raises BudgetError if a check is short. A row
is one expert as one tensor-parallel rank holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ziggurat.kernels.lookahead import lookahead_bytes
from ziggurat.residency import arena_size
from ziggurat.residency.arena_size import Room
from ziggurat.residency.budget_checks import MachineLimits, direct_check, disk_checks, lookahead_check
from ziggurat.residency.budget_plan import ArenaKind, Check, Plan, RankPlan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.direct_layers import direct_indices
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.sizes import format_bytes, row_stride
from ziggurat.residency.streaming.sizing import LEAST_ROWS, RingShape, auto_rows, ring_of

__all__ = ["Check", "MachineLimits", "ModelFacts", "Plan", "RankPlan", "memory_reserve", "plan"]

_AUTO_PERCENT = 25
_MAY_GROW = " (the host of this virtual machine may give it more once its memory is used)"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of a model's routed experts; `hidden` and `intermediate` are the whole model's.

    `layer_ids`: the model's own numbers of these layers; () = 0, 1, 2…
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    layer_ids: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Experts of all layers: the rows of one pack."""
        return self.layers * self.experts

    def rank_intermediate(self, tp_size: int) -> int:
        """Intermediate channels that each of `tp_size` ranks holds. ConfigError if they do not divide."""
        if tp_size < 1:
            raise ConfigError(f"tensor parallel size: at least 1, not {tp_size}")
        if self.intermediate % tp_size:
            raise ConfigError(
                f"tensor parallel size {tp_size} does not divide the experts' {self.intermediate} channels"
            )
        return self.intermediate // tp_size


def memory_reserve(available: int) -> int:
    """Bytes of `available` host memory that tiers leave to everything else: a tenth, 256 MiB to 4 GiB."""
    return min(max(available // 10, 256 << 20), 4 << 30)


def plan(
    config: TiersConfig,
    facts: ModelFacts,
    row_bytes: int,
    *,
    machine: MachineLimits,
    tp_size: int = 1,
    rank: int | None = None,
    graph_tokens: int = 0,
) -> Plan:
    """Sizes every tier and checks it against `machine`.

    `row_bytes`: payload of one row of one rank. `rank` None plans all ranks on this machine together; a
    number plans that rank alone, against what the machine has left at this moment. `graph_tokens`: tokens
    of the largest captured batch, 0 where the host runs the layers. Raises ConfigError if the model or a
    list of sizes does not fit `tp_size`.
    """
    facts.rank_intermediate(tp_size)
    if rank is not None and not 0 <= rank < tp_size:
        raise ConfigError(f"rank {rank} of {tp_size} does not exist")
    return _Planner(config, facts, row_bytes, machine, tp_size, rank, graph_tokens).plan()


class _Planner:
    """The steps of `plan()`, which share their inputs and add to one list of notes."""

    def __init__(
        self,
        config: TiersConfig,
        facts: ModelFacts,
        row_bytes: int,
        machine: MachineLimits,
        tp_size: int,
        rank: int | None,
        graph_tokens: int,
    ) -> None:
        self.config, self.machine, self.tp_size, self.row_bytes = config, machine, tp_size, row_bytes
        self.experts = facts.experts
        self.host, self.disk, self.device = config.tiers.host, config.tiers.disk, config.tiers.device
        self.planned = range(tp_size) if rank is None else (rank,)
        self.stride, self.total = row_stride(row_bytes), facts.rows
        self.on_cpu = machine.device == "cpu"
        # Eager code serves a layer in chunks, so one slot is enough; a graph needs all it can route to.
        self.pool_floor = max(1, min(facts.experts, facts.top_k * graph_tokens))
        direct = direct_indices(self.device.direct_layers, facts.layer_ids or range(facts.layers))
        self.direct_rows = len(direct) * facts.experts
        self.most_slots = max(1, self.total - self.direct_rows)
        self.arena_floor = min(self.disk.readers + self.direct_rows, self.total)
        self.notes: list[str] = list(machine.notes)
        spendable = [
            max(0, have - memory_reserve(have))
            for have in (machine.memory_available, machine.cgroup_headroom)
            if have is not None
        ]
        self.share = min(spendable) // tp_size if spendable else None  # of host memory, for each rank
        # Of the memory of an arena process, for all that are planned; None: arenas are the engine's own.
        self.room = None if self.host.share is None else machine.arena_room
        if self.host.share is not None and self.room is None:
            self.notes.append(
                f"tiers.host.share: no arena process at {self.host.share}, so this engine has an arena of its own"
            )

    def _node(self, rank: int) -> int | None:
        """The NUMA node of a rank's pinned arena."""
        return self.machine.nodes[rank] if rank < len(self.machine.nodes) else None

    def _node_share(self, rank: int) -> int | None:
        """What a rank may take of its node, which it shares with the other ranks there; None: no limit known."""
        node = self._node(rank)
        available = dict(self.machine.node_available).get(-1 if node is None else node)
        if available is None:
            return None
        sharing = sum(self._node(one) == node for one in range(self.tp_size))
        return max(0, available - memory_reserve(available)) // sharing

    def plan(self) -> Plan:
        kind = self._arena_kind()
        ranks = tuple(self._rank(one, kind) for one in self.planned)
        if not any(one.arena_rows for one in ranks):
            kind = "none"
        if kind == "pageable" and isinstance(self.host.numa, int):
            self.notes.append(f"tiers.host.numa: {self.host.numa} has no effect on a pageable arena")
        pack_bytes = self.total * self.stride
        return Plan(
            device=self.machine.device,
            codec=self.config.codecs.base,
            tp_size=self.tp_size,
            row_bytes=self.row_bytes,
            stride=self.stride,
            rows=self.total,
            pack_bytes=pack_bytes,
            pool_floor=self.pool_floor,
            arena_floor=self.arena_floor,
            arena_kind=kind,
            ranks=ranks,
            checks=tuple(self._checks(ranks, kind, pack_bytes)),
            notes=tuple(dict.fromkeys(self.notes)),
            arena_shared=self.room is not None and kind != "none",
        )

    def _arena_kind(self) -> ArenaKind:
        if self.on_cpu:
            return "pageable"
        if self.host.on_limit != "pageable" or self.host.size.is_auto:
            return "pinned"
        wanted = min(self.host.size.rows(stride=self.stride, total_rows=self.total), self.total) * self.stride
        limits = [("the locked-memory limit", self.machine.memlock)]
        limits += [
            (f"what NUMA node {self._node(one)} can give", self._node_share(one)) for one in self.planned
        ]
        for name, limit in limits:
            if limit is not None and wanted > limit:
                self.notes.append(
                    f"the arena is pageable: {format_bytes(wanted)} is more than {name}, {format_bytes(limit)},"
                    " and tiers.host.on_limit is pageable"
                )
                return "pageable"
        return "pinned"

    def _rank(self, rank: int, kind: ArenaKind) -> RankPlan:
        pool_rows = self._pool_rows(rank)
        ring = self._ring(pool_rows)
        arena_rows = self._arena_rows(rank, kind, pool_rows)
        return RankPlan(
            rank=rank,
            pool_rows=pool_rows,
            pool_bytes=pool_rows * self.stride,
            arena_rows=arena_rows,
            arena_bytes=arena_rows * self.stride,
            staging_bytes=0
            if arena_rows and self.room is None
            else min(self.disk.readers, self.total) * self.stride,
            coverage=pool_rows / self.total,
            pinned_bytes=arena_rows * self.stride if kind == "pinned" else 0,
            numa_node=self._node(rank) if kind == "pinned" and arena_rows else None,
            ring_parts=ring.parts,
            ring_rows=ring.rows,
            ring_bytes=ring.total * self.stride,
            direct_rows=self.direct_rows,
            spare_bytes=self._spare_bytes(pool_rows),
        )

    def _spare_bytes(self, pool_rows: int) -> int:
        """Where rows go that are fetched before they are asked for; nothing is where the pool has every row."""
        if self.config.miss.lookahead and pool_rows >= self.most_slots:
            self.notes.append("miss.lookahead has no effect beside a pool that holds every expert")
        if not self.config.miss.lookahead or self.on_cpu or pool_rows >= self.most_slots:
            return 0
        return lookahead_bytes(self.stride)

    def _ring(self, pool_rows: int) -> RingShape:
        """Staging memory for prompts; none where the pool has every row or is host memory itself."""
        written = not self.device.staging.is_auto
        if self.on_cpu or pool_rows >= self.total:
            if written:
                why = "on a CPU" if self.on_cpu else "beside a pool that holds every expert"
                self.notes.append(f"tiers.device.staging has no effect {why}")
            return RingShape(0, 0)
        rows = self._ring_rows()
        if rows < LEAST_ROWS:
            return RingShape(rows, 1)  # refused by a check
        ring = ring_of(rows, self.experts)
        if written and ring_of(rows, rows).rows > self.experts:
            self.notes.append(
                f"tiers.device.staging has room for {rows} rows; {ring.total} are used, since a part of it holds at "
                f"most the {self.experts} experts of a layer"
            )
        return ring

    def _ring_rows(self) -> int:
        size = self.device.staging
        if size.is_auto:
            return auto_rows(self.stride, self._device_room())
        return size.rows(stride=self.stride, total_rows=self.total)

    def _pool_rows(self, rank: int) -> int:
        size = self.device.size_of(rank, self.tp_size)
        if not size.is_auto:
            rows = size.rows(stride=self.stride, total_rows=self.total)
            return self._capped(rows, "tiers.device.size", self.most_slots)
        memory = self.share if self.on_cpu else self._device_room()
        part = min(self.total * _AUTO_PERCENT // 100, self.most_slots)
        if memory is None:
            return max(part, self.pool_floor)
        if self.most_slots * self.stride <= memory // 4:
            return self.most_slots
        if not self.on_cpu:  # a pool that leaves something out has staging memory beside it
            beside = ring_of(max(LEAST_ROWS, self._ring_rows()), self.experts).total * self.stride
            beside += lookahead_bytes(self.stride) if self.config.miss.lookahead else 0
            memory = max(0, memory - beside)
        return max(min(part, memory // 2 // self.stride), self.pool_floor)

    def _device_room(self) -> int | None:
        """Device memory for a pool: what is free less what the kernels take."""
        free = self.machine.device_free
        return None if free is None else max(0, free - self.machine.device_workspace)

    def _arena_rows(self, rank: int, kind: ArenaKind, pool_rows: int) -> int:
        size, bound = self.host.size, self._arena_bound(rank, kind, pool_rows)
        if size.is_auto:
            return self._auto_arena_rows(rank, kind, pool_rows)
        rows = size.rows(stride=self.stride, total_rows=self.total)
        rows = self._capped(rows, "tiers.host.size", self.total)
        if self.host.on_limit != "shrink" or bound is None or rows <= bound or rows <= self.arena_floor:
            return rows
        shrunk = max(bound, self.arena_floor)
        self.notes.append(
            f"rank {rank}: arena shrunk from {rows} to {shrunk} rows"
            f" ({format_bytes(shrunk * self.stride)}) to fit (tiers.host.on_limit: shrink)"
        )
        return shrunk

    def _auto_arena_rows(self, rank: int, kind: ArenaKind, pool_rows: int) -> int:
        """Every row that fits, since each one that is not in the arena comes from the disk."""
        if pool_rows >= self.total:
            self.notes.append("no arena: the pool holds every expert")
            return 0
        limits = (
            ("host memory", self.machine.memory_available),
            ("cgroup memory", self.machine.cgroup_headroom),
        )
        rooms = arena_size.memory_rooms(
            limits, ranks=self.tp_size, pool_bytes=pool_rows * self.stride, on_cpu=self.on_cpu
        )
        if kind == "pinned":
            rooms += self._pinned_rooms(rank)
        if self.room is not None:
            rooms = [Room(self.room // len(self.planned), "the arena process", "raise its --limit for more")]
        tightest = min(rooms, key=lambda room: room.nbytes, default=None)
        rows = self.total if tightest is None else min(self.total, tightest.nbytes // self.stride)
        if rows < self.arena_floor:
            limit = "host memory" if tightest is None else tightest.limit
            self.notes.append(f"no arena: {limit} has room for {rows} rows, fewer than {self._arena_needs()}")
            return 0
        note = arena_size.describe(rows, self.total, self.stride, tightest, inline=kind == "pinned")
        self.notes.append(note if len(self.planned) == 1 else f"rank {rank}: {note}")
        return rows

    def _pinned_rooms(self, rank: int) -> Iterable[Room]:
        """What a page-locked arena has beside host memory as a whole."""
        if self.machine.memlock is not None:
            yield Room(self.machine.memlock, "the locked-memory limit", "raise it with ulimit -l for more")
        if (share := self._node_share(rank)) is not None:
            node = self._node(rank)
            yield Room(
                share,
                "the machine's memory" if node is None else f"NUMA node {node}",
                "its reserve is left to everything else",
            )

    def _arena_bound(self, rank: int, kind: ArenaKind, pool_rows: int) -> int | None:
        """Rows of arena that fit this rank's share of host memory and of its node, and its locked-memory limit."""
        bounds = []
        if self.room is not None:
            return self.room // len(self.planned) // self.stride
        if self.share is not None:
            bounds.append(self.share - (pool_rows * self.stride if self.on_cpu else 0))
        if kind == "pinned" and self.machine.memlock is not None:
            bounds.append(self.machine.memlock)
        if kind == "pinned" and (of_node := self._node_share(rank)) is not None:
            bounds.append(of_node)
        return max(0, min(bounds)) // self.stride if bounds else None

    def _arena_needs(self) -> str:
        readers = f"{min(self.disk.readers, self.total)} readers"
        return f"{readers} and {self.direct_rows} rows of direct layers" if self.direct_rows else readers

    def _capped(self, rows: int, key: str, most: int) -> int:
        if rows > most:
            every = "every expert" if most == self.total else "every expert that is not read in place"
            self.notes.append(f"{key} has room for {rows} rows; {most} hold {every} and are used")
            return most
        return rows

    def _checks(self, ranks: tuple[RankPlan, ...], kind: ArenaKind, pack_bytes: int) -> Iterable[Check]:
        yield self._pool_floor_check(ranks)
        if kind != "none" or self.direct_rows:
            yield self._arena_floor_check(ranks)
        if self.direct_rows:
            yield direct_check(self.direct_rows, kind, on_cpu=self.on_cpu)
        miss = self.config.miss
        if miss.lookahead and any(one.pool_rows < self.most_slots for one in ranks):
            yield lookahead_check(miss.lookahead, miss.mode, kind, on_cpu=self.on_cpu)
        yield from self._asked_arena_checks(ranks)
        yield from self._memory_checks(ranks)
        if kind == "pinned":
            yield from self._pinned_checks(ranks)
        yield from self._device_checks(ranks)
        yield from disk_checks(self.disk, self.machine, len(self.planned), pack_bytes, self.total)

    def _arena_floor_check(self, ranks: tuple[RankPlan, ...]) -> Check:
        smallest = min(ranks, key=lambda one: one.arena_rows)
        advice, detail = "set it to 0, or lower tiers.disk.readers", "a place for each read in flight"
        if self.direct_rows:
            advice = "or take layers out of tiers.device.direct_layers"
            detail = f"{self.direct_rows} rows of direct layers and {detail}"
        return Check(
            "arena floor",
            self.arena_floor,
            smallest.arena_rows,
            "rows",
            "tiers.host.size",
            f"raise tiers.host.size to {self.arena_floor} rows, {advice}",
            f"{detail}{self._of_rank(smallest)}",
        )

    def _device_checks(self, ranks: tuple[RankPlan, ...]) -> Iterable[Check]:
        ring = [one for one in ranks if one.ring_parts or one.pool_rows < self.total]
        if not self.on_cpu and ring:
            yield Check(
                "staging floor",
                LEAST_ROWS,
                min(one.ring_parts * one.ring_rows for one in ring),
                "rows",
                "tiers.device.staging",
                f"raise tiers.device.staging to {format_bytes(LEAST_ROWS * self.stride)} or more, or set it to auto",
                f"{format_bytes(self.stride)} a row; one arrives while another is computed with",
            )
        if self.on_cpu or self.machine.device_free is None:
            return
        largest = max(ranks, key=lambda one: one.pool_bytes + one.beside_bytes)
        workspace = self.machine.device_workspace
        staging = f" + {format_bytes(largest.ring_bytes)} of staging" if largest.ring_bytes else ""
        spares = f" + {format_bytes(largest.spare_bytes)} of look-ahead" if largest.spare_bytes else ""
        kernels = f" + {format_bytes(workspace)} for the kernels" if workspace else ""
        lower = "tiers.device.staging" if largest.ring_bytes > largest.pool_bytes else "tiers.device.size"
        yield Check(
            "device memory",
            largest.pool_bytes + largest.beside_bytes + workspace,
            self.machine.device_free,
            "bytes",
            lower,
            f"lower {lower}",
            f"pool{staging}{spares}{kernels}{self._of_rank(largest)}",
        )

    def _pinned_checks(self, ranks: tuple[RankPlan, ...]) -> Iterable[Check]:
        if self.machine.memlock is not None:
            largest = max(ranks, key=lambda one: one.arena_bytes)
            yield Check(
                "locked memory",
                largest.arena_bytes,
                self.machine.memlock,
                "bytes",
                "tiers.host.size",
                "raise the limit (ulimit -l), lower tiers.host.size, or set tiers.host.on_limit: pageable",
                f"arena{self._of_rank(largest)}",
            )
        for node, available in self.machine.node_available if self.room is None else ():
            wanted = sum(one.pinned_bytes for one in ranks if one.numa_node == node)
            if wanted:
                reserve = memory_reserve(available)
                yield Check(
                    f"memory of NUMA node {node}",
                    wanted,
                    max(0, available - reserve),
                    "bytes",
                    "tiers.host.size",
                    "lower tiers.host.size, set tiers.host.on_limit: shrink, or set tiers.host.numa to another node"
                    " or to none",
                    f"arenas bound to it; {format_bytes(reserve)} of {format_bytes(available)} left to everything else",
                )

    def _pool_floor_check(self, ranks: tuple[RankPlan, ...]) -> Check:
        smallest = min(ranks, key=lambda one: one.pool_rows)
        return Check(
            "pool floor",
            self.pool_floor,
            smallest.pool_rows,
            "rows",
            "tiers.device.size",
            f"raise tiers.device.size to {format_bytes(self.pool_floor * self.stride)} or more",
            f"{format_bytes(self.stride)} a row{self._of_rank(smallest)}",
        )

    def _asked_arena_checks(self, ranks: tuple[RankPlan, ...]) -> Iterable[Check]:
        """Bytes asked for that no memory limit allows are a mistake, also where fewer hold every expert."""
        size, share = self.host.size, self.share if self.room is None else None
        if size.kind != "bytes" or share is None or self.host.on_limit == "shrink":
            return
        asked = int(size.amount)
        if asked > share and asked > max(one.arena_bytes for one in ranks):
            yield Check(
                "arena size",
                asked,
                share,
                "bytes",
                "tiers.host.size",
                f"lower tiers.host.size ({format_bytes(self.total * self.stride)} hold every expert) "
                "or set tiers.host.on_limit: shrink",
                "each rank's tiers.host.size against its share of the memory that may be used",
            )

    def _memory_checks(self, ranks: tuple[RankPlan, ...]) -> Iterable[Check]:
        arena = sum(one.arena_bytes for one in ranks)
        if self.room is not None:
            yield Check(
                "arena process",
                arena,
                self.room,
                "bytes",
                "tiers.host.size",
                "lower tiers.host.size, raise the --limit of `ziggurat arena`, or set tiers.host.share: null",
                "arenas, in its memory and not the engine's",
            )
            arena = 0
        staging = sum(one.staging_bytes for one in ranks)
        pool = sum(one.pool_bytes for one in ranks) if self.on_cpu else 0
        parts = {"arena": arena, "reads in flight": staging, "pool": pool}
        detail = " + ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
        if staging > max(arena, pool):
            key, advice = "tiers.disk.readers", "lower tiers.disk.readers"
        elif pool >= arena:
            key, advice = "tiers.device.size", "lower tiers.device.size"
        else:
            key = "tiers.host.size"
            advice = "lower tiers.host.size or set tiers.host.on_limit: shrink"
        for name, available in (
            ("host memory", self.machine.memory_available),
            ("cgroup memory", self.machine.cgroup_headroom),
        ):
            if available is not None:
                reserve = memory_reserve(available)
                grows = name == "host memory" and self.machine.memory_may_grow
                yield Check(
                    name,
                    arena + staging + pool,
                    max(0, available - reserve),
                    "bytes",
                    key,
                    advice + (_MAY_GROW if grows else ""),
                    f"{detail}; {format_bytes(reserve)} of {format_bytes(available)} left to everything else",
                )

    def _of_rank(self, one: RankPlan) -> str:
        return f", rank {one.rank}" if self.tp_size > 1 else ""
