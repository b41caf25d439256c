"""Policies of the host arena, below a pool under the device's rules: what has to be read from disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ziggurat.residency.policies.base import PolicySettings
from ziggurat.residency.policies.registry import HOST_POLICY, host_half_life
from ziggurat.residency.simulation.events import Events, make_events
from ziggurat.residency.simulation.host import HostResult, run_arena, simulated_host_names
from ziggurat.residency.simulation.requests import Requests
from ziggurat.residency.simulation.simulate import DEVICE, simulate
from ziggurat.residency.simulation.trace import Trace

BATCHES: Final = (1, 4)
POOLS: Final = (10.0, 25.0)
ARENAS: Final = (25.0, 50.0, 75.0)
FLOORS: Final = (0.0, 0.5, 1.0)
FLOORED: Final = (HOST_POLICY, "lru")
HALF_LIVES: Final = (0.5, 1.0, 2.0, 4.0)
SHORT: Final = 64
BEFORE: Final = ("lfu-decay", 256.0)
"""What an arena had before it had a policy of its own, and its half-life."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One arena. half_life: steps, None: what the service chooses. floor: None does not tell layers apart."""

    label: str
    policy: str
    half_life: float | None = None
    floor: float | None = None


def settings_of(requests: Requests) -> Iterator[Setting]:
    """Everything that is compared."""
    for name in simulated_host_names():
        yield Setting(name, name)
    yield Setting(f"{BEFORE[0]}, half-life {BEFORE[1]:g}", BEFORE[0], BEFORE[1])
    for name in FLOORED:
        for floor in FLOORS:
            yield Setting(f"{name} by layer, floor {floor:.0%}", name, floor=floor)
    for times in HALF_LIVES:
        if times != 1.0:
            half_life = times * host_half_life(requests.experts, requests.top_k)
            yield Setting(f"{HOST_POLICY}, half-life × {times:g}", HOST_POLICY, half_life)


def study(subjects: Iterable[tuple[str, Trace]]) -> list[dict[str, Any]]:
    """One dictionary a trace, batch, pool and arena: rows read from disk a step, and steps without one in percent."""
    lines = []
    for label, trace in subjects:
        for batch in BATCHES:
            events = make_events(trace, batch)
            for pool in POOLS:
                requests = asked(events, pool)
                for arena in ARENAS:
                    places = requests.places_for(arena)
                    found = {one.label: _run(requests, one, places) for one in settings_of(requests)}
                    lines.append(
                        {
                            "trace": label,
                            "batch": batch,
                            "pool": pool,
                            "arena": arena,
                            "places": places,
                            "asked": next(iter(found.values())).to_json()["asked_per_step"],
                            "arenas": {name: summary(one) for name, one in found.items()},
                        }
                    )
                    print("arena", label, batch, pool, arena, flush=True)
    return lines


def asked(events: Events, pool: float) -> Requests:
    """What a pool under the device's rules asks for."""
    requests = Requests.of(events)
    simulate(events, DEVICE, pool, sharing="shared", requests=requests)
    return requests


def _run(requests: Requests, one: Setting, places: int) -> HostResult:
    return run_arena(requests, one.policy, places, settings=PolicySettings(one.half_life), floor=one.floor)


def summary(found: HostResult) -> dict[str, float]:
    line = found.to_json()
    return {"read": line["read_per_step"], "none": round(100 * line["no_read_share"], 2)}


def scans(trace: Trace, batch: int) -> list[dict[str, Any]]:
    """Short sequences whose first half is a prompt, so that one comes every few steps: what has to be read for steps
    that only decode if prompts are told apart, and if not."""
    events = make_events(_short(trace), batch)
    lines = []
    for arena in ARENAS:
        requests = asked(events, 25.0)
        # The same requests, with nobody knowing which of them were a prompt's.
        untold = Requests(requests.layers, requests.experts, requests.top_k)
        for batches in requests.by_step():
            for keys, weights in batches:
                untold.ask(keys, [1] * len(weights))
            untold.end_step()
        places = requests.places_for(arena)
        told = run_arena(requests, HOST_POLICY, places)
        blind = run_arena(untold, HOST_POLICY, places)
        steps = [step for step, batches in enumerate(requests.by_step()) if not _has_prompt(batches)]
        lines.append(
            {
                "arena": arena,
                "told": round(float(told.read[steps].mean()), 3),
                "untold": round(float(blind.read[steps].mean()), 3),
            }
        )
    return lines


def _short(trace: Trace) -> Trace:
    """The texts in pieces of SHORT positions."""
    pieces = trace.positions // SHORT
    ids = trace.ids[:, : pieces * SHORT].reshape(-1, SHORT, trace.layers, trace.top_k)
    lengths = np.full(len(ids), SHORT, dtype=np.int64)
    return Trace(ids, trace.experts, lengths, lengths // 2, name=trace.name)


def _has_prompt(batches: list[tuple[list[int], list[int]]]) -> bool:
    return any(weight == 0 for _, weights in batches for weight in weights)
