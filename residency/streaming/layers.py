"""MoE layers whose absent experts flow past the pool: through a ring of staging memory, changing no slot.

A prompt uses nearly every expert of a layer once. Giving each of them a slot would evict what decoding needs, and end
with a pool full of rows that nobody asks for again. So resident experts are computed in place, and all others part by
part: while kernels read one part of the ring, the copy engine fills the next ones.

A pass of many tokens is *blind*: all absent experts of every layer come, in ascending order, whether or not somebody
is routed to them. Nothing then depends on the routing, so that no layer waits for it, and the parts that come next are
known also across layers: they travel while attention runs. What the pass counts comes from one copy at its end.

A pass of fewer tokens looks at each layer's routing, and brings the routed experts only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.direct_layers import DirectLayers
from ziggurat.residency.fetch import Fetcher
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import IntArray, PassState, StepTokens
from ziggurat.residency.ports import LayerKernels, RowPool
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.slots import ABSENT
from ziggurat.residency.streaming.books import Lost, RoutingLog, account, fail
from ziggurat.residency.streaming.courses import Course, CourseTables, Indices, Place, places
from ziggurat.residency.streaming.ring import StagingRing

#: Pairs per expert from which on a step is blind: with so many, even routing tells about 5 % of the experts unused.
BLIND_PAIRS_PER_EXPERT = 3
#: Parts that are looked at for rows on disk only, beyond those in the ring.
_PARTS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Rows of a batch from `first` on: x [n, H], ids [n, k] and live int32 [1], all on the device."""

    x: torch.Tensor
    ids: torch.Tensor
    live: torch.Tensor
    first: int

    @property
    def end(self) -> int:
        return self.first + self.x.shape[0]


@dataclass(frozen=True, slots=True)
class _Staged:
    """A part of the ring on its way. failed: expert -> why its row did not come."""

    place: Place
    memory: RowPool
    failed: dict[int, str]


class StreamedLayers:
    """Runs the layers of passes through `ring`, beside the slots in `pool`, which it only reads.

    A batch that `kernels` take in several parts of tokens (`part_tokens`) streams a layer once for each of them, since
    contributions are summed per token in a fixed order: their workspace should hold the largest batch.

    device: holds the number of live tokens; whoever runs the pass arms it. direct: layers without slots, which stream
    as any other, so that a row travels once for all tokens; in the books they miss nothing.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        kernels: LayerKernels,
        pool: RowPool,
        fetcher: Fetcher,
        device: DeviceState,
        ring: StagingRing,
        direct: DirectLayers | None = None,
    ) -> None:
        self._geometry = geometry
        self._kernels = kernels
        self._pool = pool
        self._fetcher = fetcher
        self._device = device
        self._ring = ring
        self._direct = direct
        self._tables = CourseTables(
            geometry.layers, geometry.experts, ring.rows, device.device, events=device.events
        )
        self._log = RoutingLog(geometry.experts)
        self._table = np.full((geometry.layers, geometry.experts), ABSENT, dtype=np.int32)
        self._state: PassState | None = None
        self._epoch = 0
        self._blind = False
        self._courses: dict[int, Course] = {}
        self._token_parts = 1
        self._coming: Iterator[Place] = iter(())
        self._next: deque[Place] = deque()  # the first of those that come, where somebody has looked ahead
        self._told = False  # whether somebody reads ahead
        self._ahead: deque[_Staged] = deque()
        self._lost: list[Lost] = []

    @property
    def ring(self) -> StagingRing:
        return self._ring

    def blind(self, tokens: int) -> bool:
        """Whether so many tokens have so many pairs that nearly every expert of a layer is used."""
        return tokens * self._geometry.top_k >= BLIND_PAIRS_PER_EXPERT * self._geometry.experts

    # -- passes ------------------------------------------------------------------------------------------------

    def begin(
        self, table: npt.NDArray[np.int32], tokens: StepTokens, epoch: int, *, blind: bool | None = None
    ) -> None:
        """Before a pass. table: int32 [L, E], the slots, which stay as they are until `end`. epoch: the step's.

        blind: None = as the number of tokens says. The first rows of a blind pass are on their way when this returns.
        """
        self._drop()
        self._table = table.copy()
        self._epoch = epoch
        self._blind = self.blind(tokens.count) if blind is None else blind
        if self._blind:
            self._courses = {
                layer: Course(np.flatnonzero(row == ABSENT), self._ring.rows)
                for layer, row in enumerate(self._table)
            }
            self._token_parts = -(-tokens.count // self._kernels.part_tokens)
        # Ahead of the rows, or this small copy would have to wait for them.
        self._tables.show(self._table, self._courses)
        if self._blind:
            self._coming = places(self._courses, Place(0, 0, 0), self._token_parts)
            self._fill()

    def end(self) -> None:
        """After a pass, or one that raised: complete the state of its layers. RoutingError for bad ids."""
        state, lost = self._state, self._lost
        calls = self._log.take() if self._blind else []
        self._drop()
        if state is None:
            return
        for layer, ids in calls:
            self._account(state, layer, ids)
            fail(self._geometry, state, lost, layer, ids)

    def _account(self, state: PassState, layer: int, ids: npt.NDArray[np.integer]) -> IntArray:
        direct = self._direct is not None and self._direct.slots_of(layer) is not None
        return account(self._geometry, state, layer, ids, self._table[layer], direct=direct)

    def _drop(self) -> None:
        self._ahead.clear()
        self._next.clear()
        if self._told:
            self._told = False
            self._fetcher.upcoming(())
        self._log.clear()
        self._coming, self._courses, self._lost = iter(()), {}, []
        self._blind, self._state, self._token_parts = False, None, 1

    # -- layers ------------------------------------------------------------------------------------------------

    def run(
        self,
        state: PassState,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H] in x's dtype. Rows of padding come out as zeros.

        A row that cannot be read fails its tokens in `state`, at the latest at the end of the pass.
        """
        self._state = state
        live = state.step.tokens.count
        if self._blind:
            self._log.add(layer, topk_ids[:live])
            used = self._table[layer] != ABSENT
        else:
            ids = topk_ids[:live].cpu().numpy()  # the layer's one host synchronisation
            pairs = self._account(state, layer, ids)
            used = (self._table[layer] != ABSENT) & (pairs > 0)
            self._courses = {layer: self._course(layer, pairs)}
            self._tables.show_course(layer, self._courses[layer])
        outs = []
        parts = self._device.parts(x.shape[0], live, self._kernels.part_tokens)
        self._token_parts = len(parts)
        for number, (first, rows, alive) in enumerate(parts):
            here = slice(first, first + rows)
            part = TokenPart(x[here], topk_ids[here], alive, first)
            self._kernels.begin(part.x, part.ids, alive)
            if used.any():
                self._add(part, self._tables.resident(layer), self._pool)
            self._stream(layer, number, part)
            outs.append(self._kernels.finish(part.x, topk_weights[here], part.ids, alive))
        if not self._blind:
            fail(self._geometry, state, self._lost, layer, ids)
            self._lost = []
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def add(self, layer: int, experts: Indices, part: TokenPart, failed: Callable[[int, str], None]) -> None:
        """Contributions of some absent experts to a layer that has begun elsewhere, in a pass that is not blind.

        failed: called with the row key and the reason of each row that could not be read.
        """
        if self._blind:
            raise StepError("a pass that does not look at its routing cannot be told what to bring")
        self._courses = {layer: Course(experts, self._ring.rows)}
        self._tables.show_course(layer, self._courses[layer])
        self._token_parts = 1
        self._stream(layer, 0, part)
        for one in self._lost:
            failed(one.key, one.reason)
        self._lost = []

    def _course(self, layer: int, pairs: IntArray) -> Course:
        return Course(np.flatnonzero((self._table[layer] == ABSENT) & (pairs > 0)), self._ring.rows)

    def _stream(self, layer: int, number: int, part: TokenPart) -> None:
        """Contributions of a layer's course."""
        count = len(self._courses[layer])
        if not count:
            return
        tables = self._tables.parts(layer, count)
        for i in range(count):
            staged = self._take(Place(layer, number, i))
            slots = tables[i]
            for expert, reason in staged.failed.items():
                slots[expert] = ABSENT
                key = layer * self._geometry.experts + expert
                self._lost.append(Lost(key, reason, part.first, part.end))
            staged.memory.ready()
            self._add(part, slots, staged.memory)
            self._fill()  # now that the part's readers are queued, its memory may be asked for

    def _add(self, part: TokenPart, slots: torch.Tensor, memory: RowPool) -> None:
        self._kernels.add(part.x, part.ids, part.live, slots=slots, pool=memory.tensor)

    # -- the ring ----------------------------------------------------------------------------------------------

    def _take(self, wanted: Place) -> _Staged:
        """The part for `wanted`, which is the oldest one ahead unless layers come in an unexpected order."""
        if not self._ahead or self._ahead[0].place != wanted:
            self._ahead.clear()
            self._next.clear()
            self._coming = places(self._courses, wanted, self._token_parts)
        self._fill()
        return self._ahead.popleft()

    def _fill(self) -> None:
        """Ask for parts until the ring is full or the pass needs no more."""
        while len(self._ahead) < self._ring.parts:
            place = self._next.popleft() if self._next else next(self._coming, None)
            if place is None:
                return
            if self._told:  # before: nobody shall read ahead what is brought now, and then again
                self._look_ahead()
            self._ahead.append(self._bring(place))
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Say which rows come after those in the ring, so that the disk works on them in the meantime."""
        while len(self._next) < _PARTS_AHEAD and (place := next(self._coming, None)) is not None:
            self._next.append(place)
        if self._next:
            self._told = True
            self._fetcher.upcoming([key for place in self._next for key in self._keys(place)])

    def _keys(self, place: Place) -> list[int]:
        base = place.layer * self._geometry.experts
        return [base + expert for expert in self._courses[place.layer].part(place.number).tolist()]

    def _bring(self, place: Place) -> _Staged:
        base = place.layer * self._geometry.experts
        memory = self._ring.turn()
        faults = self._fetcher.stage(self._keys(place), memory, epoch=self._epoch)
        return _Staged(place, memory, {fault.key - base: fault.reason for fault in faults})
