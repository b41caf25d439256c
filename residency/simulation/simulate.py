"""Runs a trace through a pool and counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from ziggurat.residency.passes import BoolArray, IntArray
from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.registry import make_policy, policy_names
from ziggurat.residency.runtime_errors import UnknownPolicyError
from ziggurat.residency.simulation.belady import BeladyPool
from ziggurat.residency.simulation.cost import StepCost
from ziggurat.residency.simulation.device import DevicePool, DeviceSettings
from ziggurat.residency.simulation.errors import SimulationError
from ziggurat.residency.simulation.events import Events
from ziggurat.residency.simulation.pools import LayerPools, PolicyPool, SimulatedPool
from ziggurat.residency.simulation.requests import Requests

Sharing = Literal["layer", "shared"]
BOUND: Final = "belady"
DEVICE: Final = "device"
_TELLS: Final = frozenset(
    {"heat-weighted", "next-use"}
)  # policies that look at routing; the others need no arrays


def simulated_names() -> tuple[str, ...]:
    """Everything that can be simulated: the registered policies, the device's own, and the bound."""
    return (*policy_names(), DEVICE, BOUND)


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened in a number of steps. Pairs are (token, choice); a pair hits if its row was resident when its layer
    began. rows: brought into the pool. decode_*: of pairs of tokens that are not prefill."""

    steps: int
    pairs: int
    hits: int
    decode_pairs: int
    decode_hits: int
    rows: int
    evictions: int
    zero_miss_steps: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.pairs if self.pairs else 0.0

    @property
    def rows_per_step(self) -> float:
        return self.rows / self.steps if self.steps else 0.0

    def to_json(self, cost: StepCost | None = None) -> dict[str, Any]:
        """Counts and what follows from them."""
        steps = max(1, self.steps)
        numbers: dict[str, Any] = {
            **asdict(self),
            "hit_ratio": round(self.hit_ratio, 6),
            "decode_hit_ratio": round(self.decode_hits / self.decode_pairs, 6) if self.decode_pairs else None,
            "missed_pairs_per_step": round((self.pairs - self.hits) / steps, 4),
            "rows_per_step": round(self.rows_per_step, 4),
            "zero_miss_share": round(self.zero_miss_steps / steps, 6),
        }
        if cost is not None:
            numbers["bytes_per_step"] = round(self.rows_per_step * cost.row_bytes)
        return numbers


@dataclass(frozen=True)
class Result:
    """One policy on one trace. missed, decode_missed, rows, evictions: int64 [steps]. cold: steps until the pool was
    full for the first time."""

    policy: str
    slots: int
    events: Events
    missed: IntArray
    decode_missed: IntArray
    rows: IntArray
    evictions: IntArray
    cold: int
    unserved: int = 0

    @property
    def all(self) -> Counts:
        return self._counts(0, self.events.steps.count)

    @property
    def cold_start(self) -> Counts:
        return self._counts(0, self.cold)

    @property
    def steady(self) -> Counts:
        return self._counts(self.cold, self.events.steps.count)

    def step_ms(self, cost: StepCost) -> dict[str, float]:
        """Predicted times of the steady steps (of all, if the pool never became full)."""
        rows = self.rows[self.cold :] if self.cold < len(self.rows) else self.rows
        times = np.array([cost.milliseconds(float(count)) for count in rows.tolist()])
        return {
            "mean": round(float(times.mean()), 4),
            "median": round(float(np.median(times)), 4),
            "p99": round(float(np.quantile(times, 0.99)), 4),
        }

    def _counts(self, first: int, last: int) -> Counts:
        pairs, decode = _pairs_of_steps(self.events)
        here = slice(first, last)
        return Counts(
            steps=last - first,
            pairs=int(pairs[here].sum()),
            hits=int(pairs[here].sum() - self.missed[here].sum()),
            decode_pairs=int(decode[here].sum()),
            decode_hits=int(decode[here].sum() - self.decode_missed[here].sum()),
            rows=int(self.rows[here].sum()),
            evictions=int(self.evictions[here].sum()),
            zero_miss_steps=int((self.missed[here] == 0).sum()),
        )


def slots_for(events: Events, coverage: float, sharing: Sharing) -> int:
    """Slots of `coverage` percent of the experts, the same number for each layer if every layer has its own pool."""
    if not 0.0 < coverage <= 100.0:
        raise SimulationError(f"a coverage of {coverage} % is not between 0 and 100")
    experts, layers = events.experts_per_layer, events.layers
    if sharing == "layer":
        return max(1, round(experts * coverage / 100)) * layers
    return max(1, round(experts * layers * coverage / 100))


def make_pool(
    events: Events,
    policy: str,
    slots: int,
    *,
    sharing: Sharing = "layer",
    atomic: bool = True,
    settings: PolicySettings | None = None,
    device: DeviceSettings | None = None,
) -> SimulatedPool:
    """A pool of `slots` slots in all under a policy of `simulated_names`. SimulationError for an unknown one."""
    layers, experts = events.layers, events.experts_per_layer
    own = sharing == "layer"
    if slots < 1 or (own and slots % layers):
        raise SimulationError(f"{slots} slots cannot be given to {layers} layers in equal parts")
    if policy == BOUND:
        return BeladyPool(events, [slots // layers] * layers if own else [slots])
    if policy == DEVICE:
        if own:
            raise SimulationError("the device's policy has one pool for all layers: --pool shared")
        return DevicePool(layers, experts, slots, device)
    half_life = None if settings is None else settings.half_life
    try:
        if not own:
            shared = make_policy(policy, PolicySettings(half_life, layers, experts))
            return PolicyPool(shared, slots, atomic=atomic)
        policies = [make_policy(policy, PolicySettings(half_life, 1, experts)) for _ in range(layers)]
    except UnknownPolicyError as error:
        raise SimulationError(f"{error}; there are also {DEVICE} and {BOUND}") from error
    return LayerPools([PolicyPool(one, slots // layers, atomic=atomic) for one in policies], experts)


def run(events: Events, policy: str, pool: SimulatedPool, requests: Requests | None = None) -> Result:
    """All steps of `events` through `pool`, which `policy` names. requests: gets what the pool brings."""
    layers, experts = events.layers, events.experts_per_layer
    bounds = events.bounds.tolist()
    keys = (events.experts + _layer_of_entries(events) * experts).tolist()
    weights = events.weights.tolist()
    pairs = events.pairs.tolist()
    steps = events.steps.count
    missed = np.zeros(steps, dtype=np.int64)
    decode_missed = np.zeros(steps, dtype=np.int64)
    rows = np.zeros(steps, dtype=np.int64)
    evictions = np.zeros(steps, dtype=np.int64)
    tells = policy in _TELLS
    asks = requests is not None and not _tell(pool, requests)
    cold = steps
    event = 0
    for step in range(steps):
        fetched_before, evicted_before = pool.fetched, pool.evictions
        missing = decode_missing = 0
        tokens = events.ids[events.decoding(step)] if tells else None
        for layer in range(layers):
            first, last = bounds[event], bounds[event + 1]
            event += 1
            ids = None if tokens is None else tokens[:, layer]
            absent = pool.event(layer, keys[first:last], weights[first:last], ids)
            for position in absent:
                missing += pairs[first + position]
                decode_missing += weights[first + position]
            if asks and absent and requests is not None:
                requests.ask([keys[first + i] for i in absent], [weights[first + i] for i in absent])
        pool.end_step()
        if requests is not None:
            requests.end_step()
        missed[step], decode_missed[step] = missing, decode_missing
        rows[step], evictions[step] = pool.fetched - fetched_before, pool.evictions - evicted_before
        if cold == steps and pool.used == pool.capacity:
            cold = step + 1
    unserved = pool.unserved if isinstance(pool, DevicePool) else 0
    return Result(policy, pool.capacity, events, missed, decode_missed, rows, evictions, cold, unserved)


def simulate(
    events: Events,
    policy: str,
    coverage: float,
    *,
    sharing: Sharing = "layer",
    atomic: bool = True,
    settings: PolicySettings | None = None,
    device: DeviceSettings | None = None,
    requests: Requests | None = None,
) -> Result:
    """One policy at one coverage (percent of the experts)."""
    slots = slots_for(events, coverage, sharing)
    pool = make_pool(events, policy, slots, sharing=sharing, atomic=atomic, settings=settings, device=device)
    return run(events, policy, pool, requests)


def _tell(pool: SimulatedPool, requests: Requests) -> bool:
    """Have a pool tell `requests` what it brings, in the portions in which a host would; whether it can."""
    if isinstance(pool, PolicyPool):
        pool.below = requests.ask
    elif isinstance(pool, LayerPools):
        pool.tell(requests.ask)
    else:
        return False
    return True


def _layer_of_entries(events: Events) -> IntArray:
    layers = np.arange(events.count, dtype=np.int64) % events.layers
    return np.repeat(layers, np.diff(events.bounds))


def _pairs_of_steps(events: Events) -> tuple[IntArray, IntArray]:
    """Pairs of each step, of all tokens and of those that are not prefill."""
    each = events.layers * events.ids.shape[2]
    bounds = events.steps.bounds
    decode: BoolArray = ~events.steps.prefill
    running = np.concatenate(([0], np.cumsum(decode.astype(np.int64))))
    return np.diff(bounds) * each, np.diff(running[bounds]) * each
