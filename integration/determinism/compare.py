"""Bit comparison of two runs of the same batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ziggurat.integration.determinism.engine import Outcome


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """What differs, in words; empty if tokens and the raw bits of all logits are the same."""
    problems = []
    if expected.tokens != found.tokens:
        problems.append("tokens differ")
    if len(expected.steps) != len(found.steps):
        problems.append(f"{len(expected.steps)} steps against {len(found.steps)}")
    for number, (a, b) in enumerate(zip(expected.steps, found.steps, strict=False)):
        if a.tokens != b.tokens or a.logits.shape != b.logits.shape:
            problems.append(f"step {number}: another batch ({a.tokens} against {b.tokens})")
            break
        unequal = a.logits.view(np.uint32) != b.logits.view(np.uint32)
        if unequal.any():
            gap = float(np.max(np.abs(a.logits - b.logits)))
            problems.append(
                f"step {number}: {int(unequal.sum())} of {unequal.size} logits differ, by up to {gap:g}"
            )
            break
    return problems
