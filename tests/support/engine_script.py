"""Runs one engine in a process of its own: ``python engine_script.py JOB.json``; a JSON line per phase on stdout.

Tensor-parallel engines spawn workers, which re-import the main module, so they need a script with a main guard.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    from ziggurat.integration.determinism.engine import SMALL_ENGINE
    from ziggurat.integration.vllm.settings import LOAD_FORMAT, to_additional_config
    from ziggurat.residency.config import TiersConfig

    tiers = TiersConfig.from_mapping(job["config"])
    llm = LLM(
        model=job["model"],
        load_format=LOAD_FORMAT,
        additional_config=to_additional_config(tiers, job["debug"]),
        **{**SMALL_ENGINE, **job["engine"]},
    )
    say("ready")
    for phase in job["phases"]:
        for path, rules in phase.get("faults", {}).items():
            Path(path).write_text(json.dumps(rules), encoding="utf-8")
        outputs = llm.generate(
            phase["prompts"],
            SamplingParams(temperature=0.0, max_tokens=phase["tokens"], ignore_eos=True),
            use_tqdm=False,
        )
        choices = [choice for output in outputs for choice in output.outputs]
        say(
            phase["name"],
            tokens=[list(c.token_ids) for c in choices],
            reasons=[c.finish_reason for c in choices],
            stops=[c.stop_reason for c in choices],
        )
    llm.llm_engine.engine_core.shutdown()


def say(name: str, **fields: Any) -> None:
    print("phase " + json.dumps({"name": name, **fields}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
