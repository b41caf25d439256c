"""A linear layer in which a row's result depends on that row alone."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import linear

#: Rows of every matrix product. BLAS picks its kernel, and with it the order of its sums, by the product's shape.
BLOCK_ROWS: Final = 8


def rowwise_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32, with the same bits for a row whatever stands beside it and wherever it stands.

    Every product has the same shape: rows are taken 8 at a time and the last ones are padded with zeros.

    Args:
        x: float32 [P, K], contiguous.
        weight: float32 [N, K], contiguous.

    Returns:
        float32 [P, N].
    """
    rows = x.shape[0]
    out = torch.empty(rows, weight.shape[0], dtype=torch.float32)
    for start in range(0, rows, BLOCK_ROWS):
        block = x.new_zeros(BLOCK_ROWS, x.shape[1])
        count = min(BLOCK_ROWS, rows - start)
        block[:count] = x[start : start + count]
        out[start : start + count] = linear(block, weight)[:count]
    return out
