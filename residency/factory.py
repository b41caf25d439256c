"""From a configuration to a running service: the budget first, then the memory, then the service over it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.pool import CpuPool
from ziggurat.residency.budget import MachineLimits, ModelFacts, plan
from ziggurat.residency.budget_plan import RankPlan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.consensus import Consensus, LocalConsensus
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.ports import ExpertOps, RowCodec, RowPack
from ziggurat.residency.runtime_errors import UnsupportedDeviceError
from ziggurat.residency.service import ExpertService


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
    codec: RowCodec,
    *,
    consensus: Consensus | None = None,
    metrics: TierMetrics | None = None,
    machine: MachineLimits | None = None,
    ops: ExpertOps | None = None,
    slot_seed: int | None = None,
    replay_enabled: bool = True,
    consensus_enabled: bool = True,
) -> ExpertService:
    """Allocate what the budget plan of this rank says and open a service over it, cold; see `warm_start`.

    pack: this rank's, opened; the service closes it (also if this call fails). machine: limits to check the plan
    against; None checks nothing. The remaining arguments are ExpertService's.

    Raises BudgetError before anything is allocated, GeometryMismatchError if the pack is not this model's, and the
    allocators' errors.
    """
    consensus = consensus or LocalConsensus()
    try:
        one = _rank_plan(config, geometry, pack, machine or MachineLimits(), consensus)
        pool = CpuPool(one.pool_rows, pack.header.stride)
        arena = PageableArena(one.arena_rows, pack.header.stride) if one.arena_rows else None
        return ExpertService(
            config,
            geometry,
            codec,
            pack,
            pool,
            arena,
            consensus=consensus,
            metrics=metrics or TierMetrics(),
            ops=ops,
            heat_folder=heat_folder(config),
            slot_seed=slot_seed,
            replay_enabled=replay_enabled,
            consensus_enabled=consensus_enabled,
        )
    except BaseException:
        pack.close()
        raise


def heat_folder(config: TiersConfig) -> Path | None:
    """Where heat files lie: beside the packs unless `heat.path` names another folder; None = nowhere."""
    return config.tiers.disk.path if config.heat.path == "auto" else config.heat.path


def _rank_plan(
    config: TiersConfig,
    geometry: ServiceGeometry,
    pack: RowPack,
    machine: MachineLimits,
    consensus: Consensus,
) -> RankPlan:
    if machine.device != "cpu" or config.tiers.device.device.startswith("cuda"):
        raise UnsupportedDeviceError(
            f"tiers.device.device: there is no pool for {config.tiers.device.device} yet; set it to cpu"
        )
    facts = ModelFacts(
        geometry.layers,
        geometry.experts,
        geometry.top_k,
        geometry.hidden,
        geometry.intermediate * consensus.size,
    )
    whole = plan(
        config,
        facts,
        pack.header.row_bytes,
        machine=machine,
        tp_size=consensus.size,
        rank=consensus.rank,
    ).require()
    return whole.ranks[0]
