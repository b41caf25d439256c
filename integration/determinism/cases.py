"""What the determinism test runs: ways to serve the same prompts that must give the same bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ziggurat.residency.config import TiersConfig

LONG_PROMPT_TOKENS = 700


@dataclass(frozen=True, slots=True)
class Case:
    """One engine. pool: a ``tiers.device.size``. mode, max_replays: its ``miss`` settings. shuffle: slot order seed."""

    name: str
    pool: str
    mode: str
    max_replays: int = 2
    shuffle: int | None = None

    def tiers(self, base: TiersConfig) -> TiersConfig:
        """``base`` with this case's pool and miss mode, and no memory of earlier runs."""
        raw: dict[str, Any] = base.model_dump(mode="json")
        raw["tiers"]["device"]["size"] = self.pool
        raw["miss"].update(mode=self.mode, max_replays=self.max_replays, tolerance=0)
        raw["heat"]["path"] = None
        return TiersConfig.from_mapping(raw)


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch of prompts. alone: names of the workloads that run each of them by itself, if there are such."""

    name: str
    prompts: tuple[str, ...]
    alone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the worker process needs; travels as JSON."""

    model: str
    config: dict[str, Any]
    cases: tuple[Case, ...]
    workloads: tuple[Workload, ...]
    tokens: int

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            model=raw["model"],
            config=raw["config"],
            cases=tuple(Case(**case) for case in raw["cases"]),
            workloads=tuple(
                Workload(w["name"], tuple(w["prompts"]), tuple(w["alone"])) for w in raw["workloads"]
            ),
            tokens=raw["tokens"],
        )


def make_cases(pools: Sequence[str], modes: Sequence[str]) -> tuple[Case, ...]:
    """The all-resident reference first, then every pool in every mode, then the largest pool in shuffled orders."""
    cases = [Case("100% resident", "100%", "inline")]
    cases += [Case(f"pool {pool}, {mode}", pool, mode) for pool in pools for mode in modes]
    cases += [
        Case(f"pool {pools[0]}, {modes[0]}, slot order {seed}", pools[0], modes[0], 2, seed)
        for seed in (1, 2)
    ]
    return tuple(cases)


def make_workloads(prompts: Sequence[str]) -> tuple[Workload, ...]:
    """Each prompt alone, all together, all together in reverse, and a prompt longer than one prefill chunk."""
    alone = [Workload(f"prompt {i} alone", (prompt,)) for i, prompt in enumerate(prompts)]
    names = tuple(workload.name for workload in alone)
    text = "\n".join(prompts)
    long = text * max(1, -(-LONG_PROMPT_TOKENS * 3 // max(1, len(text))))
    return (
        *alone,
        Workload("all together", tuple(prompts), names),
        Workload("all together, reversed", tuple(reversed(prompts)), tuple(reversed(names))),
        Workload("a long prompt among others", (long[: LONG_PROMPT_TOKENS * 3], *prompts[:2])),
    )
