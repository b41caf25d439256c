"""What the end-to-end tests ask of an engine, and how they compare two answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ziggurat.integration.determinism.compare import Outcome
    from ziggurat.integration.determinism.engine import Engine

SINGLE = "def read_config(path):\n    "
BATCH = (
    "import os\nimport sys\n\nclass Cache:\n",
    "# The quick brown fox",
    "for i in range(10):\n",
    "def main():\n    parser = argparse",
)
# Longer than two prefill chunks of the test engine (256 tokens).
LONG = "\n".join(f"def function_{i}(a, b):\n    return a * {i} + b - {i * 7 % 13}\n" for i in range(36))


def run_workloads(engine: Engine) -> dict[str, Outcome]:
    """Greedy decode alone, a batch of four, and a prompt of several prefill chunks beside two short ones."""
    return {
        "alone": engine.run([SINGLE], 12),
        "batch of four": engine.run(BATCH, 8),
        "long prompt": engine.run([LONG, *BATCH[:2]], 4),
    }


def assert_identical(expected: dict[str, Outcome], found: dict[str, Outcome]) -> None:
    """Fails with what differs unless tokens and raw logit bits are the same in every workload."""
    from ziggurat.integration.determinism.compare import differences

    problems = {name: differences(expected[name], found[name]) for name in expected}
    assert not any(problems.values()), problems
