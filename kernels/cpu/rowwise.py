"""A linear layer in which a row's result depends on that row alone."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch.nn.functional import linear

#: Rows of every matrix product. BLAS picks its kernel, and with it the order of its sums, by the product's shape.
BLOCK_ROWS: Final = 8


def rowwise_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32, with the same bits for a row whatever stands beside it and wherever it stands.

    Every product has the same shape and starts at the same alignment: rows are copied 8 at a time into a block, which
    the last ones do not fill.

    Args:
        x: float32 [P, K].
        weight: float32 [N, K], contiguous.

    Returns:
        float32 [P, N].
    """
    rows, columns = x.shape
    step = BLOCK_ROWS if position_free(*weight.shape, torch.get_num_threads()) else 1
    out = torch.empty(rows, weight.shape[0], dtype=torch.float32)
    block = torch.zeros(step, columns, dtype=torch.float32)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        block[:count] = x[start : start + count]
        out[start : start + count] = linear(block, weight)[:count]
    return out


@cache
def position_free(outputs: int, inputs: int, threads: int) -> bool:
    """Whether this machine's BLAS treats all rows of a block alike, for one weight shape and number of threads.

    Tried once with random numbers, whose sums in another order would round differently: a row at each place among
    others must give what a block of nothing but that row gives. Where it does not, rows are multiplied one by one.
    """
    generator = torch.Generator().manual_seed(outputs * inputs + threads)
    weight = torch.randn(outputs, inputs, generator=generator)
    row, *others = torch.randn(1 + BLOCK_ROWS, inputs, generator=generator)
    expected = linear(row.repeat(BLOCK_ROWS, 1), weight)[0]
    for place in range(BLOCK_ROWS):
        block = torch.stack(others)
        block[place] = row
        if not torch.equal(linear(block, weight)[place], expected):
            return False
    return True
