"""From a configuration to a running service: the budget first, then the memory, then the service over it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from ziggurat.allocators.shared.errors import SharedArenaError
from ziggurat.kernels.codecs.base import Codec
from ziggurat.residency.budget import MachineLimits, ModelFacts, plan
from ziggurat.residency.budget_plan import Plan, RankPlan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.consensus import Consensus, LocalConsensus
from ziggurat.residency.describe import describe_budget, describe_link
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.placement import (
    Placement,
    map_arena,
    open_arena,
    open_kernels,
    open_pool,
    open_ring,
    open_shared_arena,
)
from ziggurat.residency.ports import ExpertOps, RowArena, RowPack, RowPool
from ziggurat.residency.runtime_errors import UnsupportedDeviceError
from ziggurat.residency.service import ExpertService
from ziggurat.residency.streaming.ring import StagingRing
from ziggurat.residency.streaming.sizing import LEAST_ROWS, RingShape, auto_rows, ring_of
from ziggurat.stores.packformat import PackHeader

logger = logging.getLogger(__name__)


class ModelSource(Protocol):
    """The facts of a checkpoint that a service needs; `hidden` and `intermediate` are the whole model's."""

    @property
    def layer_ids(self) -> tuple[int, ...]: ...

    @property
    def experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...


def geometry_of(model: ModelSource, tp_size: int, *, clamp: float | None = None) -> ServiceGeometry:
    """The sizes of one rank of `tp_size`."""
    return ServiceGeometry(
        layers=len(model.layer_ids),
        experts=model.experts,
        top_k=model.top_k,
        hidden=model.hidden,
        intermediate=model.intermediate // tp_size,
        layer_ids=tuple(model.layer_ids),
        clamp=clamp,
    )


def open_service(
    config: TiersConfig,
    geometry: ServiceGeometry,
    pack: RowPack,
    codec: Codec,
    *,
    place: Placement | None = None,
    consensus: Consensus | None = None,
    metrics: TierMetrics | None = None,
    machine: MachineLimits | None = None,
    ops: ExpertOps | None = None,
    slot_seed: int | None = None,
    replay_enabled: bool = True,
    consensus_enabled: bool = True,
) -> ExpertService:
    """Allocate what the budget plan of this rank says and open a service over it, cold; see `warm_start`.

    pack: this rank's, opened; the service closes it (also if this call fails). place: where layers compute; None =
    where `tiers.device.device` says, auto being the CPU. machine: limits to check the plan against; None checks
    nothing. The remaining arguments are ExpertService's.

    Raises BudgetError and UnsupportedDeviceError before anything is allocated, GeometryMismatchError if the pack is
    not this model's, and the allocators' errors.
    """
    consensus = consensus or LocalConsensus()
    place = place or Placement(torch.device(_configured(config)))
    pool: RowPool | None = None
    arena: RowArena | None = None
    ring: StagingRing | None = None
    try:
        place.check(codec.name)
        machine = machine or MachineLimits(device=str(place.device))
        whole = _rank_plan(config, geometry, pack, machine, consensus, place)
        kind, one = whole.arena_kind, whole.ranks[0]
        # The pool first: where a device lacks the memory, nothing else has been done for nothing.
        pool = open_pool(place, one.pool_rows, pack.header.stride)
        shape = _ring_shape(config, geometry, place, one, pack.header.stride)
        if shape.total:
            ring = open_ring(place, shape, pack.header.stride)
        kernels = open_kernels(place, geometry, codec)
        arena = _arena(config, place, one, kind, pack.header)
        metrics = metrics or TierMetrics()
        describe_budget(metrics, whole)
        if place.on_gpu:
            describe_link(metrics, place.device)
        mapped = None if kernels is None else map_arena(place, arena)
        if ring is None and mapped is not None and mapped.view is not None and _needs_ring(config, consensus):
            ring = open_ring(place, ring_of(LEAST_ROWS, geometry.experts), pack.header.stride)
        return ExpertService(
            config,
            geometry,
            codec,
            pack,
            pool,
            arena,
            consensus=consensus,
            metrics=metrics,
            ops=ops,
            kernels=kernels,
            ring=ring,
            max_tokens=place.max_tokens,
            mapped=mapped,
            heat_folder=heat_folder(config),
            slot_seed=slot_seed,
            replay_enabled=replay_enabled,
            consensus_enabled=consensus_enabled,
        )
    except BaseException:
        for part in (arena, ring, pool, pack):
            if part is not None:
                part.close()
        raise


def _configured(config: TiersConfig) -> str:
    device = config.tiers.device.device
    return "cpu" if device == "auto" else device


def _ring_shape(
    config: TiersConfig, geometry: ServiceGeometry, place: Placement, one: RankPlan, stride: int
) -> RingShape:
    """What the plan says; it has no staging memory for a CPU, where kernels run in tests only."""
    if place.on_gpu or not place.kernels or one.pool_rows >= geometry.rows:
        return RingShape(one.ring_parts, one.ring_rows)
    size = config.tiers.device.staging
    rows = auto_rows(stride, None) if size.is_auto else size.rows(stride=stride, total_rows=geometry.rows)
    return ring_of(max(LEAST_ROWS, rows), geometry.experts)


def _needs_ring(config: TiersConfig, consensus: Consensus) -> bool:
    """Whether layers may fetch rows by themselves also in a pool that the plan gave no staging memory."""
    return config.miss.mode == "inline" or (config.miss.mode == "auto" and consensus.size > 1)


def _arena(
    config: TiersConfig, place: Placement, one: RankPlan, kind: str, header: PackHeader
) -> RowArena | None:
    """This rank's arena. Without one rows still pass through host memory on their way to a GPU; few places do."""
    host, stride = config.tiers.host, header.stride
    if one.arena_rows and host.share is not None:
        private = min(config.tiers.disk.readers, header.rows)
        try:
            return open_shared_arena(
                place,
                host.share,
                header,
                one.arena_rows,
                private,
                kind=kind,
                numa=host.numa,
                on_limit=host.on_limit,
            )
        except SharedArenaError as error:
            logger.warning("tiers.host.share: %s; this engine has an arena of its own", error)
    if one.arena_rows:
        return open_arena(place, one.arena_rows, stride, kind=kind, numa=host.numa, on_limit=host.on_limit)
    if not place.on_gpu:
        return None
    staging = max(1, one.staging_bytes // stride)
    return open_arena(place, staging, stride, kind="pinned", numa=host.numa, on_limit="pageable")


def heat_folder(config: TiersConfig) -> Path | None:
    """Where heat files lie: beside the packs unless `heat.path` names another folder; None = nowhere."""
    return config.tiers.disk.path if config.heat.path == "auto" else config.heat.path


def _rank_plan(
    config: TiersConfig,
    geometry: ServiceGeometry,
    pack: RowPack,
    machine: MachineLimits,
    consensus: Consensus,
    place: Placement,
) -> Plan:
    if (machine.device == "cpu") is place.on_gpu:
        raise UnsupportedDeviceError(
            f"tiers.device.device: the plan is for {machine.device}, but layers compute on {place.device}"
        )
    facts = ModelFacts(
        geometry.layers,
        geometry.experts,
        geometry.top_k,
        geometry.hidden,
        geometry.intermediate * consensus.size,
        geometry.layer_ids,
    )
    return plan(
        config,
        facts,
        pack.header.row_bytes,
        machine=machine,
        tp_size=consensus.size,
        rank=consensus.rank,
    ).require()
