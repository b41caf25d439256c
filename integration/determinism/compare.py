"""Bit comparison of two runs of the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ziggurat.integration.vllm.capture import CapturedStep


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens: sampled ids of each prompt. steps: every step's logits, in order."""

    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[CapturedStep, ...]


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


def neighbour_differences(alone: Sequence[Outcome], together: Outcome) -> list[str]:
    """Requests whose logits in a batch are not those of the same prompt alone, bit for bit.

    alone: one outcome per prompt, in the batch's order. The tiers promise this for the experts; whether it holds for a
    whole model depends on the other layers' kernels, which choose their arithmetic by the batch's shape.
    """
    rows: dict[str, list[npt.NDArray[np.float32]]] = {}
    for step in together.steps:
        for request, logits in zip(step.requests, step.logits, strict=True):
            rows.setdefault(request, []).append(logits)
    problems = []
    for number, (single, batched) in enumerate(zip(alone, rows.values(), strict=True)):
        expected = [step.logits[0] for step in single.steps]
        same = len(expected) == len(batched) and all(
            np.array_equal(a.view(np.uint32), b.view(np.uint32))
            for a, b in zip(expected, batched, strict=True)
        )
        if not same:
            problems.append(f"prompt {number} of the batch")
    return problems
