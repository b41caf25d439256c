"""Runs a job's cases in one process, a JSON line each: ``python -m ziggurat.integration.determinism.worker JOB``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ziggurat.integration.determinism.cases import Job
from ziggurat.integration.determinism.compare import differences
from ziggurat.integration.determinism.engine import Outcome, open_engine
from ziggurat.residency.config import TiersConfig


def run(job: Job) -> bool:
    """True if every case gives the reference's bits for every workload."""
    base = TiersConfig.from_mapping(job.config)
    reference: dict[str, Outcome] = {}
    same = True
    for case in job.cases:
        debug = {} if case.shuffle is None else {"shuffle_slots": case.shuffle}
        with open_engine(Path(job.model), case.tiers(base), debug) as engine:
            for workload in job.workloads:
                outcome = engine.run(workload.prompts, job.tokens)
                expected = reference.setdefault(workload.name, outcome)
                problems = differences(expected, outcome)
                same &= not problems
                _say(case=case.name, workload=workload.name, steps=len(outcome.steps), problems=problems)
    return same


def _say(**fields: object) -> None:
    print("ziggurat-replay " + json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(0 if run(Job.load(Path(sys.argv[1]))) else 1)
