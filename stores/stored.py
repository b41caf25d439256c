"""Expert weights as a checkpoint stores them: plain data, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

WeightFormat = Literal["bf16", "f16", "f32", "fp8_block", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One expert matrix, logical shape (N, K). Tensors are views of the mapped file where the file allows it.

    data: bf16/f16/f32 `[N, K]`; float8_e4m3fn `[N, K]`; uint8 `[N, K/2]` packed e2m1 (low nibble = even k).
    scale: fp8_block f32, bf16 or e8m0 `[ceil(N/bn), ceil(K/bk)]` (multiply); nvfp4 float8_e4m3fn
    `[N, K/16]`; mxfp4 uint8 (e8m0 bits) `[N, K/32]`; None for plain floats.
    scale_2: nvfp4 only, f32 scalar (multiply). block: fp8_block only, (bn, bk).
    """

    name: str
    format: WeightFormat
    shape: tuple[int, int]
    data: torch.Tensor
    scale: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """w1 = gate [I, H], w3 = up [I, H], w2 = down [H, I]."""

    w1: StoredWeight
    w3: StoredWeight
    w2: StoredWeight
