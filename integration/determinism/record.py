"""Records the routing of one engine: ``python -m ziggurat.integration.determinism.record JOB``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ziggurat.residency.config import TiersConfig


@dataclass(frozen=True, slots=True)
class RecordJob:
    """model: folder. config: a TiersConfig as a mapping. prompts: decoded together. tokens: for each. folder: receives
    `routing.npz`."""

    model: str
    config: dict[str, Any]
    prompts: list[str]
    tokens: int
    folder: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> RecordJob:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def run(job: RecordJob) -> None:
    """Generate for all prompts and close the engine, which writes the trace."""
    from ziggurat.integration.determinism.engine import open_engine

    config = TiersConfig.from_mapping(job.config)
    with open_engine(Path(job.model), config, {"record_routing": job.folder}) as engine:
        engine.run(job.prompts, job.tokens)


if __name__ == "__main__":
    run(RecordJob.load(Path(sys.argv[1])))
