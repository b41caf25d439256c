"""What a service has beside its usual parts when layers fetch their own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ziggurat.kernels.lookahead import make_lookahead
from ziggurat.residency.consensus import Consensus
from ziggurat.residency.direct_layers import DirectLayers
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.heat import HeatMap
from ziggurat.residency.host_cache import FillReport
from ziggurat.residency.inline.cache import InlineCache
from ziggurat.residency.inline.churn import ArenaChurn
from ziggurat.residency.inline.layers import InlineLayers
from ziggurat.residency.inline.promote import Promoter
from ziggurat.residency.inline.state import InlineState
from ziggurat.residency.inline.step import InlineStepRunner
from ziggurat.residency.ports import LayerKernels
from ziggurat.residency.slots import SlotPool
from ziggurat.residency.step import Arm, MissSettings
from ziggurat.residency.streaming.layers import StreamedLayers
from ziggurat.residency.streaming.ring import StagingRing


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the parts tell their service. arm: the state of the pass that begins, None after the last. settle: book
    deferred passes, waiting for them. filled: rows were read into the arena, in any thread. promoted: the same of rows
    that nobody waited for."""

    arm: Arm
    settle: Callable[[], None]
    filled: Callable[[FillReport], None]
    promoted: Callable[[FillReport], None]


class Inline:
    """Layers, step runner and promotion of one service.

    arena: as the device sees it. ring: for eager passes, see `StreamedLayers`. batch: rows promoted at a time.
    direct: layers without slots. lookahead: keep spares for rows that are fetched before they are asked for.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        kernels: LayerKernels,
        slots: SlotPool,
        fetcher: Fetcher,
        cache: InlineCache,
        arena: torch.Tensor,
        ring: StagingRing,
        max_tokens: int,
        consensus: Consensus,
        settings: MissSettings,
        heat: HeatMap,
        batch: int,
        hooks: Hooks,
        direct: DirectLayers | None = None,
        lookahead: bool = False,
    ) -> None:
        self._cache = cache
        self._heat = heat
        self._rows = geometry.rows
        self._experts = geometry.experts
        admitting = [layer for layer in range(geometry.layers) if direct is None or not direct.mask[layer, 0]]
        state = InlineState(
            geometry.layers,
            geometry.experts,
            max_tokens,
            arena,
            slots.pool.tensor,
            first=admitting[0] if admitting else 0,
        )
        streamed = StreamedLayers(geometry, kernels, slots.pool, fetcher, state, ring, direct)
        misses = slots.pool.slots < len(admitting) * geometry.experts
        self.promoter = Promoter(cache, self._heat_of, batch, hooks.promoted)
        self.layers = InlineLayers(
            geometry,
            kernels,
            slots,
            cache,
            state,
            streamed,
            self.promoter.want,
            direct,
            make_lookahead(state.admission, state.ahead) if lookahead and misses else None,
        )
        self.runner = InlineStepRunner(
            geometry,
            slots,
            fetcher,
            cache,
            consensus,
            settings,
            self.layers,
            hooks.arm,
            settle=hooks.settle,
            report=hooks.filled,
            admitting=len(admitting),
        )
        self.layers.hand_over(None)

    def hand_over(self) -> None:
        """Slots have been filled, or emptied, by the host: the device has them now, with the heat that is known."""
        self.layers.hand_over(self._heat.counts)

    @contextmanager
    def churn(self, seed: int, most: int) -> Iterator[ArenaChurn]:
        """See `ExpertService.churn`."""
        self.runner.doubt()
        with ArenaChurn(self._cache, self._rows, seed=seed, most=most) as churn:
            yield churn

    def _heat_of(self, key: int) -> float:
        return float(self._heat.counts[divmod(key, self._experts)])
