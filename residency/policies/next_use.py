"""Next use: what the routing of the present token resembles says which rows are needed soon."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from ziggurat.residency.policies import next_use_score as rules
from ziggurat.residency.policies.base import IdArray, PolicySettings
from ziggurat.residency.policies.cold_first import ColdFirstPolicy, first_allowed
from ziggurat.residency.policies.next_use_compiled import Compiled, as_ids, compiled


class NextUsePolicy(ColdFirstPolicy):
    """Evicts the row whose next use is expected latest. Learns while it runs, and knows nothing in advance.

    When a layer has been routed, each of its experts gets a chance of being used in the next step, the weighted
    geometric mean of three estimates (the constants are in `next_use_score`):

    * heat: how often it was used, decaying by a thirty-second a step;
    * followers: how much more often than usual it came one or a few steps after the experts that were just used;
    * matches: what came after those of the last 256 steps in which the same token's sequence went most nearly the
      way it is going now, in this layer and in the ones before it.

    A use in the next step is worth 1 and half as much for every step later; the layers that run before a row's own
    count as parts of a step. That is the order of victims. A layer costs work in proportion to its tokens.

    Without `routed`, or without settings that say what keys mean, it is an LRU.
    """

    name = "next-use"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        settings = settings or PolicySettings()
        self._layers, self._experts = settings.layers, settings.experts
        self._recent: dict[int, None] = {}  # least recently used first; only until routing is heard of
        self._now = 0
        self._told: _Learned | None = None
        if self._experts:
            compiled()

    def routed(self, layer: int, ids: IdArray) -> None:
        if not self._experts or not len(ids):
            return
        if self._told is None:
            self._told = _Learned(self._layers, self._experts, ids.shape[1])
            for key in self._recent:
                self._told.hold(key)
            self._recent.clear()
        self._told.routed(layer, as_ids(ids), self._now)

    def advance(self, steps: int = 1) -> None:
        self._now += steps

    def _admit(self, key: int) -> None:
        if self._told is None:
            self._recent[key] = None
        else:
            self._told.hold(key)

    def _use(self, key: int) -> None:
        if self._told is None:
            del self._recent[key]
            self._recent[key] = None

    def _drop(self, key: int) -> None:
        if self._told is None:
            del self._recent[key]
        else:
            self._told.release(key)

    def _choose(self, blocked: Container[int]) -> int | None:
        if self._told is None:
            return first_allowed(self._recent, blocked)
        return self._told.coldest(blocked)


class _Learned:
    """Everything that is learned from routing, and which keys may be chosen."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        rows, history = rules.ROWS, rules.HISTORY
        words = (experts + 63) // 64
        self._run: Compiled = compiled()
        self._layers, self._experts, self._top_k = layers, experts, top_k
        self._layer = layers - 1
        self._done = np.full(layers, -1, dtype=np.int64)  # step in which a layer was heard of last
        self._began = -1
        self._place = np.zeros(rows, dtype=np.int64)
        self._steps = np.zeros(rows, dtype=np.int64)
        self._counted = np.zeros(rows, dtype=np.int64)
        self._masks = np.zeros((rows, layers, history, words), dtype=np.uint64)
        self._chosen = np.zeros((rows, layers, history, top_k), dtype=np.int64)
        self._context = np.zeros((rows, history))
        self._recent = np.zeros((rows, layers, experts))
        self._followers = np.zeros((layers, experts, experts))
        self._seen = np.zeros((layers, experts))
        self._heat = np.full((layers, experts), top_k / experts)
        self._base = np.full((layers, experts), top_k / experts)
        self._mark = np.full(experts, -1, dtype=np.int64)
        self._stamp = 0
        self._scores = np.zeros((layers, experts))
        self._work = np.zeros((6, experts))
        self._bits = self._work.view(np.int64)
        self._held = np.zeros((layers, experts), dtype=np.uint8)
        self._low = np.zeros(layers)
        self._low_key = np.zeros(layers, dtype=np.int64)
        self._fresh = np.zeros(layers, dtype=np.int64)

    def hold(self, key: int) -> None:
        self._mark_held(key, 1)

    def release(self, key: int) -> None:
        self._mark_held(key, 0)

    def _mark_held(self, key: int, value: int) -> None:
        layer, expert = divmod(key, self._experts)
        self._held[layer, expert] = value
        self._fresh[layer] = 0

    def routed(self, layer: int, ids: np.typing.NDArray[np.int64], now: int) -> None:
        """A second call for a layer in a step is another part of a batch that is too large to follow."""
        self._layer = layer
        if self._done[layer] == now or ids.shape[1] != self._top_k:
            return
        self._done[layer] = now
        kept, extra = ids[: rules.ROWS], ids[rules.ROWS :]
        if self._began != now:
            self._began = now
            rows = slice(0, len(kept))
            self._steps[rows] = self._counted[rows]
            self._place[rows] = self._counted[rows] % rules.HISTORY
            self._counted[rows] += 1
        run, place, steps = self._run, self._place, self._steps
        run.record(kept, layer, place, self._masks, self._chosen, self._context, steps)
        run.follow(kept, layer, self._recent, self._followers, self._seen)
        self._stamp += 1
        run.warm(kept, extra, layer, self._heat, self._base, self._mark, self._stamp)
        run.score(
            kept,
            layer,
            place,
            steps,
            self._chosen,
            self._context,
            self._followers,
            self._seen,
            self._heat,
            self._base,
            self._scores,
            self._work,
            self._bits,
        )
        self._fresh[layer] = 0

    def coldest(self, blocked: Container[int]) -> int | None:
        skipped: list[int] = []
        while (key := self._look()) >= 0 and key in blocked:
            self.release(key)
            skipped.append(key)
        for one in skipped:
            self.hold(one)
        return None if key < 0 else key

    def _look(self) -> int:
        return int(
            self._run.coldest(self._scores, self._held, self._low, self._low_key, self._fresh, self._layer)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Learned:
        """What is compiled is shared; arrays are copied."""
        clone = object.__new__(_Learned)
        for name, value in vars(self).items():
            setattr(clone, name, value.copy() if isinstance(value, np.ndarray) else value)
        clone._bits = clone._work.view(np.int64)
        return clone
