"""Runs a job's cases in one process, a JSON line each: ``python -m ziggurat.integration.determinism.worker JOB``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ziggurat.integration.determinism.cases import Job
from ziggurat.integration.determinism.compare import Outcome, differences, neighbour_differences
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.residency.config import TiersConfig


def run(job: Job) -> bool:
    """True if every case gives the reference's bits for every workload."""
    base = TiersConfig.from_mapping(job.config)
    reference: dict[str, Outcome] = {}
    same = True
    for case in job.cases:
        debug = {} if case.shuffle is None else {"shuffle_slots": case.shuffle}
        with open_engine(Path(job.model), case.tiers(base), debug) as engine:
            answers: dict[str, Outcome] = {}
            for workload in job.workloads:
                outcome = engine.run(workload.prompts, job.tokens)
                expected = reference.setdefault(workload.name, outcome)
                problems = differences(expected, outcome)
                same &= not problems
                answers[workload.name] = outcome
                alone = [answers[name] for name in workload.alone]
                _say(
                    case=case.name,
                    workload=workload.name,
                    steps=len(outcome.steps),
                    problems=problems,
                    neighbours=neighbour_differences(alone, outcome) if alone else None,
                )
    return same


def _say(**fields: object) -> None:
    print("ziggurat-replay " + json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(0 if run(Job.load(Path(sys.argv[1]))) else 1)
