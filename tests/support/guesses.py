"""Guesses for tests of look-ahead: partly right ones."""

from __future__ import annotations

import torch


def guesses_like(ids: torch.Tensor, experts: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [T, width]: what ids [T, k] routes to, in part, and others; some of them no experts."""
    made = torch.randint(-1, experts + 1, (len(ids), width), generator=generator, dtype=torch.int32)
    right = torch.rand(len(ids), width, generator=generator) < 0.5
    known = ids[:, torch.randint(0, ids.shape[1], (width,), generator=generator)]
    return torch.where(right, known, made)
