"""What decoding will take with a plan: from recorded routing or heat, and from rates that are given or were measured.

Rates that nobody gives come from the result files of the checkout, if it has any of this machine's GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.allocators.topology import gpus
from ziggurat.integration.packing import wanted_headers
from ziggurat.residency.budget_plan import Plan
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.factory import heat_folder
from ziggurat.residency.heat import HeatKey, HeatMap, load_heat
from ziggurat.residency.prediction import (
    Misses,
    PredictionError,
    StepEstimate,
    load_routing,
    misses_of_heat,
    misses_of_routing,
    side_by_side,
)
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.packformat import PackHeader

#: Part of the steps of a trace that warms the pool and is not counted.
_WARM_SHARE = 4
_MOST_STEPS = 2048  # of a trace: a second or two, and enough for two digits


@dataclass(frozen=True, slots=True)
class Given:
    """What somebody knows better. link: GB/s. step_ms: of a step with all experts resident. trace: an .npz of routing.
    tokens: sequences decoded together."""

    tokens: int = 1
    link: float | None = None
    step_ms: float | None = None
    trace: Path | None = None

    @property
    def asks(self) -> bool:
        """Whether somebody wants an estimate."""
        return self.link is not None or self.step_ms is not None or self.trace is not None


@dataclass(frozen=True, slots=True)
class Estimate:
    """step: None if there is too little to go by. notes: where its numbers come from, or what is missing."""

    step: StepEstimate | None
    notes: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """For people."""
        return self.notes if self.step is None else (self.step.line(), *self.notes)

    def to_json(self) -> dict[str, Any]:
        """As plain values; times are milliseconds."""
        one = self.step
        numbers = {
            "tokens": None if one is None else one.tokens,
            "missed_rows": None if one is None else one.misses.rows,
            "missed_share": None if one is None else one.misses.share,
            "fetch_ms": None if one is None else one.fetch_ms,
            "resident_ms": None if one is None else one.resident_ms,
            "step_ms": None if one is None else one.step_ms,
        }
        return {**numbers, "notes": list(self.notes)}


def estimate(
    checkpoint: Checkpoint, config: TiersConfig, plan: Plan, given: Given, results: Path | None
) -> Estimate | None:
    """None if the plan leaves nothing to miss, or has no GPU. results: folder of result files, by GPU.

    Raises PredictionError for a trace of another model.
    """
    one = plan.ranks[0]
    if plan.device == "cpu" or one.pool_rows >= plan.rows:
        return None
    if one.direct_rows:
        return Estimate(None, ("decode: no estimate for plans with layers that are read in place",))
    measured = _Measured.of_this_machine(results)
    misses, source = _misses(checkpoint, config, plan, given)
    if misses is None:
        return Estimate(None, (source,))
    link, notes = given.link, [source]
    if link is None:
        link = measured.link()
        if link is None:
            return Estimate(None, (*notes, "decode: no estimate of times without --link"))
        notes.append(f"decode: the link is taken to be what {measured.name}/transfers.json says")
    step_ms = given.step_ms
    if step_ms is None:
        header = wanted_headers(checkpoint, config, plan.tp_size)[0]
        step_ms = measured.resident_ms(header, checkpoint.top_k, given.tokens)
        if step_ms is None:
            notes.append(
                "decode: --step-ms, what a step takes with all experts resident, would complete this"
            )
        else:
            notes.append(
                f"decode: the work is that of MoE layers alone, from {measured.name}/inline.json; --step-ms is better"
            )
    return Estimate(StepEstimate(given.tokens, misses, plan.stride, link, step_ms), tuple(notes))


def _misses(
    checkpoint: Checkpoint, config: TiersConfig, plan: Plan, given: Given
) -> tuple[Misses | None, str]:
    """Misses of a step, and where they come from or what is missing."""
    slots = plan.ranks[0].pool_rows
    if given.trace is not None:
        routing = load_routing(given.trace)
        shape = (len(checkpoint.layer_ids), checkpoint.top_k)
        if routing.shape[2:] != shape or not 0 <= routing.min() <= routing.max() < checkpoint.experts:
            raise PredictionError(
                f"{given.trace.name} routes {routing.shape[2]} layers to {routing.shape[3]} of "
                f"{int(routing.max()) + 1} experts; this model has {shape[0]} layers, top-{shape[1]} of "
                f"{checkpoint.experts}"
            )
        steps = side_by_side(routing, given.tokens)[:_MOST_STEPS]
        found = misses_of_routing(steps, checkpoint.experts, slots, warm=len(steps) // _WARM_SHARE)
        return found, f"decode: misses are those of {len(steps)} steps of {given.trace.name}"
    header = wanted_headers(checkpoint, config, plan.tp_size)[0]
    folder = heat_folder(config)
    if folder is None:
        return None, "decode: no estimate without --trace, since heat is switched off"
    key = HeatKey(
        header.identity,
        header.codec,
        header.codec_version,
        header.layers,
        header.experts,
        header.hidden,
        header.intermediate,
    )
    heat = HeatMap(header.layers, header.experts)
    note = load_heat(folder / key.filename(header.tp_rank, header.tp_size), key, heat)
    if not note.done or not (heat.counts.sum(axis=1) > 0).all():
        return None, f"decode: no estimate without --trace: {note.reason}"
    return misses_of_heat(heat.counts, checkpoint.top_k, slots, tokens=given.tokens), (
        "decode: misses are guessed from the heat file, on the high side; --trace is better"
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """The result files of one GPU. folder: None where there are none."""

    folder: Path | None

    @classmethod
    def of_this_machine(cls, results: Path | None) -> _Measured:
        """Those of a GPU with the name of this machine's first one."""
        here = gpus().gpus[:1]
        for path in sorted(results.glob("*/transfers.json")) if results is not None and here else ():
            if _read(path).get("machine", {}).get("gpu") == here[0].name:
                return cls(path.parent)
        return cls(None)

    @property
    def name(self) -> str:
        return "" if self.folder is None else self.folder.name

    def link(self) -> float | None:
        """GB/s."""
        if self.folder is None:
            return None
        found = _read(self.folder / "transfers.json").get("transfers", {}).get("peak_gb_per_s")
        return None if found is None else float(found)

    def resident_ms(self, header: PackHeader, top_k: int, tokens: int) -> float | None:
        """Milliseconds of the MoE layers of a step of this very shape."""
        if self.folder is None:
            return None
        found = _read(self.folder / "inline.json")
        wanted = {
            "layers": header.layers,
            "experts": header.experts,
            "top_k": top_k,
            "hidden": header.hidden,
            "intermediate": header.intermediate,
            "codec": header.codec,
        }
        if any(found.get(name) != value for name, value in wanted.items()):
            return None
        for case in found.get("cases", ()):
            if case["tokens"] == tokens and "resident_ms" in case:
                return float(case["resident_ms"]["mean"])
        return None


def _read(path: Path) -> dict[str, Any]:
    """A result file's content; nothing if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
