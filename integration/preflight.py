"""Everything that can be refused before an engine allocates anything: model, budget, packs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ziggurat.allocators.errors import AllocatorError
from ziggurat.integration.machine import machine_limits
from ziggurat.integration.packing import encoder_for, pack_paths, require_packs, wanted_headers
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.workspace import check_shape, part_tokens, workspace_bytes
from ziggurat.kernels.errors import CodecError
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.budget import ModelFacts, Plan, plan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import ResidencyError
from ziggurat.residency.streaming.advice import ChunkAdvice, advise
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import StoreError

#: Tokens of a batch where nobody says how many there may be: vLLM's usual --max-num-batched-tokens.
DEFAULT_MAX_TOKENS = 8192

_ANY_TOKENS = 1 << 30  # more than a batch has

REFUSALS: tuple[type[Exception], ...] = (AllocatorError, CodecError, LayerError, ResidencyError, StoreError)


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """The shape that the budget needs."""
    return ModelFacts(
        layers=len(checkpoint.layer_ids),
        experts=checkpoint.experts,
        top_k=checkpoint.top_k,
        hidden=checkpoint.hidden,
        intermediate=checkpoint.intermediate,
        layer_ids=tuple(checkpoint.layer_ids),
    )


def plan_for(
    checkpoint: Checkpoint,
    config: TiersConfig,
    tp_size: int,
    *,
    graph_tokens: int = 0,
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> Plan:
    """The plan of a model on this machine; not yet required to work.

    graph_tokens: tokens of the largest batch that a graph serves without a miss, see `ziggurat.residency.budget.plan`.
    max_tokens: tokens of the largest batch, on which depends what the kernels of a GPU take beside the pool.
    """
    row_bytes = encoder_for(checkpoint, config.codecs.base).row_bytes(tp_size)
    paths = pack_paths(checkpoint, config, tp_size)
    workspace = kernel_workspace(checkpoint, tp_size, max_tokens)
    headers = wanted_headers(checkpoint, config, tp_size)
    machine = machine_limits(config, paths, tp_size=tp_size, workspace=workspace, headers=headers)
    machine = replace(machine, packs_buildable=checkpoint.has_experts)
    if machine.device != "cpu":
        check_shape(_rank_geometry(checkpoint, tp_size), checkpoint.experts, checkpoint.top_k)
    return plan(
        config,
        model_facts(checkpoint),
        row_bytes,
        machine=machine,
        tp_size=tp_size,
        graph_tokens=0 if machine.device == "cpu" else graph_tokens,
    )


def chunk_advice(checkpoint: Checkpoint, result: Plan, *, link: float, compute: float) -> ChunkAdvice | None:
    """How many tokens a chunk of a prompt should have, for the rank with the smallest pool; None if all have all rows.

    link: bytes a second from host memory to the device. compute: operations a second of the kernels on large batches.
    """
    geometry = _rank_geometry(checkpoint, result.tp_size)
    absent = result.rows - min(one.pool_rows for one in result.ranks)
    return advise(
        absent_rows=absent / len(checkpoint.layer_ids),
        stride=result.stride,
        experts=checkpoint.experts,
        top_k=checkpoint.top_k,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        link=link,
        compute=compute,
        part_tokens=part_tokens(geometry, checkpoint.top_k, _ANY_TOKENS),
    )


def kernel_workspace(checkpoint: Checkpoint, tp_size: int, max_tokens: int) -> int:
    """Bytes that the kernels of each GPU take beside the pool for batches of up to `max_tokens` tokens."""
    return workspace_bytes(
        _rank_geometry(checkpoint, tp_size), checkpoint.experts, checkpoint.top_k, max_tokens
    )


def _rank_geometry(checkpoint: Checkpoint, tp_size: int) -> ExpertGeometry:
    return ExpertGeometry(checkpoint.hidden, checkpoint.intermediate // tp_size)


def preflight(
    model: str | Path, config: TiersConfig, tp_size: int, *, max_tokens: int = DEFAULT_MAX_TOKENS
) -> Plan:
    """Raise one of :data:`REFUSALS` unless ``model`` can be served; returns the plan. Reads headers only."""
    with Checkpoint.open(Path(model)) as checkpoint:
        require_packs(checkpoint, config, tp_size)
        return plan_for(checkpoint, config, tp_size, max_tokens=max_tokens).require()
