"""One tiered model in one worker process: from vLLM's layers to an :class:`ExpertService`."""

from __future__ import annotations

import atexit
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ziggurat.integration.machine import machine_limits
from ziggurat.integration.observability.endpoint import serve_metrics
from ziggurat.integration.observability.shared import SharedBuffer
from ziggurat.integration.packing import ensure_packs, open_pack, pack_paths, wanted_headers
from ziggurat.integration.preflight import kernel_workspace
from ziggurat.integration.vllm.capture import LogitsCapture
from ziggurat.integration.vllm.compute import join_logs
from ziggurat.integration.vllm.errors import SetupError, UnsupportedFeatureError
from ziggurat.integration.vllm.lookahead import RouterGuesses, whole_graph
from ziggurat.integration.vllm.recording import RoutingRecording
from ziggurat.integration.vllm.settings import Settings
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.residency.consensus import Consensus
from ziggurat.residency.factory import geometry_of, open_service
from ziggurat.residency.metrics import TierMetrics
from ziggurat.residency.placement import Placement
from ziggurat.residency.service import ExpertService, PassPath, StepResult, StepTokens
from ziggurat.stores.checkpoint import Checkpoint

logger = logging.getLogger("vllm.ziggurat")

_building: ContextVar[TieredModel | None] = ContextVar("ziggurat_building", default=None)
_LAYER_ID = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_open: weakref.WeakSet[TieredModel] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Close the tiers of every model in this process: heat is saved, threads are joined, memory is given back."""
    for tiered in list(_open):
        tiered.close()


def building() -> TieredModel | None:
    """The model that our loader is constructing in this context, or None when another loader is at work."""
    return _building.get()


class TieredModel:
    """Collects the MoE layers while vLLM constructs the model, then opens the tiers for them.

    settings: what the engine was configured with. checkpoint: the opened model folder (headers only).
    rank, size: tensor-parallel place of this process. consensus: agreement with the other ranks.
    place: where and on what this worker computes.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoint: Checkpoint,
        rank: int,
        size: int,
        consensus: Consensus,
        instance: str,
        place: Placement,
    ) -> None:
        self.settings = settings
        self.checkpoint = checkpoint
        self.rank = rank
        self.size = size
        self.instance = instance
        self.place = place
        self.consensus = consensus
        self.service: ExpertService | None = None
        folder = settings.debug.capture_logits
        self.capture = None if folder is None else LogitsCapture(folder, rank)
        self.recording: RoutingRecording | None = None
        self._layers: list[str] = []
        self._clamps: set[float | None] = set()
        self._buffer: SharedBuffer | None = None
        self._stop_endpoint: Callable[[], None] | None = None

    @contextmanager
    def construct(self) -> Iterator[None]:
        """While active, MoE layers that vLLM constructs belong to this model."""
        token = _building.set(self)
        try:
            yield
        finally:
            _building.reset(token)

    def check_layer(self, layer: Any, prefix: str, quant_config: Any) -> None:
        """Raise :class:`UnsupportedFeatureError` for an MoE layer whose arithmetic is not ours."""
        moe = layer.moe_config
        refusals = {
            "expert biases": getattr(moe, "has_bias", False),
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "an activation other than SiLU": str(getattr(layer.activation, "value", layer.activation))
            != "silu",
            "a SwiGLU with swiglu_alpha": getattr(layer, "swiglu_alpha", None) not in (None, 1.0),
            "a SwiGLU with swiglu_beta": getattr(layer, "swiglu_beta", None) not in (None, 0.0),
            "expert parallelism": moe.moe_parallel_config.use_ep,
        }
        for what, present in refusals.items():
            if present:
                raise UnsupportedFeatureError(f"{prefix}: {what} is not supported by tiered experts")
        # As in vLLM's own kernels: gate at most the limit, up within plus and minus the limit, 0 for no limit.
        self._clamps.add(float(getattr(layer, "swiglu_limit", None) or 0.0) or None)
        if len(self._clamps) > 1:
            raise UnsupportedFeatureError(f"{prefix}: layers with different values of swiglu_limit")

    def register_layer(self, layer: Any, prefix: str, experts: int, hidden: int, intermediate: int) -> int:
        """Number the next MoE layer and check that it is the one the checkpoint has there."""
        index = len(self._layers)
        match = _LAYER_ID.search(prefix)
        layer_id = int(match.group(1)) if match else -1
        expected = self.checkpoint.layer_ids[index] if index < len(self.checkpoint.layer_ids) else None
        if layer_id != expected:
            raise SetupError(
                f"vLLM builds MoE layer {prefix!r} as number {index}, but the checkpoint's MoE layers are "
                f"{list(self.checkpoint.layer_ids)}"
            )
        found = (experts, hidden, intermediate * self.size)
        wanted = (self.checkpoint.experts, self.checkpoint.hidden, self.checkpoint.intermediate)
        if found != wanted:
            raise SetupError(
                f"{prefix}: vLLM says (experts, hidden, intermediate) = {found}, the checkpoint {wanted}"
            )
        self._layers.append(prefix)
        return index

    def open(self) -> None:
        """Build missing packs and open the tiers; called once all layers and other weights are there."""
        if len(self._layers) != len(self.checkpoint.layer_ids):
            raise SetupError(
                f"vLLM built {len(self._layers)} of the checkpoint's {len(self.checkpoint.layer_ids)} MoE layers: "
                "this model class has experts that bypass vLLM's RoutedExperts and cannot be tiered"
            )
        config = self.settings.config
        ensure_packs(self.checkpoint, config, self.size)
        debug = self.settings.debug
        join_logs()
        (clamp,) = self._clamps
        self._buffer = SharedBuffer(self.instance, self.rank)
        self.service = open_service(
            config,
            geometry_of(self.checkpoint, self.size, clamp=clamp),
            open_pack(self.checkpoint, config, self.rank, self.size),
            get_codec(config.codecs.base),
            place=self.place,
            consensus=self.consensus,
            metrics=TierMetrics(self._buffer.view),
            machine=machine_limits(
                config,
                pack_paths(self.checkpoint, config, self.size),
                tp_size=self.size,
                rank=self.rank,
                workspace=kernel_workspace(self.checkpoint, self.size, max(1, self.place.max_tokens)),
                headers=wanted_headers(self.checkpoint, config, self.size)[self.rank :][:1],
            ),
            slot_seed=debug.shuffle_slots,
            replay_enabled=debug.replay,
            consensus_enabled=debug.consensus,
        )
        if debug.record_routing is not None and self.rank == 0:
            model = self.checkpoint.path.name
            self.recording = RoutingRecording(debug.record_routing, self.service.geometry, self.place, model)
        port = config.metrics.port
        if port is not None:
            self._stop_endpoint = serve_metrics(self.service.metrics, self.rank, port)
        start = self.service.warm_start()
        logger.info(
            "rank %d: pool %d rows (%.1f %% of the experts), %d warm from heat (%s)",
            self.rank,
            self.service.slots.slots,
            100 * self.service.slots.slots / self.service.geometry.rows,
            start.pool_rows,
            start.heat,
        )
        _open.add(self)

    def look_ahead(self, model: torch.nn.Module) -> None:
        """Have the routers of the opened model guess for the layers before them, if `miss.lookahead` says so and there
        is anything to fetch."""
        assert self.service is not None
        width = self.settings.config.miss.lookahead
        if width and self.service.lookahead.possible:
            self.service.lookahead.by(RouterGuesses(model, self._layers, width, whole_graph))
            logger.info("rank %d: layers look ahead, %d guesses a token", self.rank, width)

    def moe(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Routed experts of one layer: x [T, H], weights and ids [T, k] -> [T, H]."""
        service = self.service
        if service is None:
            raise SetupError("a tiered layer ran before its tiers were opened")
        if self.recording is not None:
            self.recording.layer(layer, topk_ids)
        return service.moe(layer, x, topk_weights, topk_ids)

    def run_step(self, forward: Callable[[PassPath], Any], tokens: StepTokens) -> StepResult[Any]:
        """One step of the service, recorded if that was asked for."""
        if self.service is None:
            raise SetupError("a step began before the tiers were opened")
        result = self.service.run_step(forward, tokens)
        if self.recording is not None:
            self.recording.step(tokens)
        return result

    def close(self) -> None:
        """Give everything back; idempotent."""
        _open.discard(self)
        service, self.service = self.service, None
        if service is not None:
            service.close()
        if self._stop_endpoint is not None:
            self._stop_endpoint()
            self._stop_endpoint = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self.capture is not None:
            self.capture.close()
        if self.recording is not None:
            self.recording.close()
