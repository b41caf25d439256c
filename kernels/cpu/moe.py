"""Reference Mixture-of-Experts operations on the CPU, in float32."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from ziggurat.kernels.codecs.base import DecodedExpert
from ziggurat.kernels.cpu.rowwise import rowwise_linear


def expert_ffn(x: torch.Tensor, expert: DecodedExpert, *, clamp: float | None = None) -> torch.Tensor:
    """One expert's feed-forward network: down(silu(gate(x)) * up(x)).

    A token's result has the same bits whatever tokens stand beside it, wherever it stands and however many there are.
    The hidden activations are rounded to x's dtype before the down projection, as kernels with 16-bit activations do;
    all sums are float32.

    Args:
        x: [P, H] of any float dtype.
        expert: the weights.
        clamp: limit of the clamped SwiGLU: gate at most ``clamp``, up within plus and minus ``clamp``.

    Returns:
        float32 [P, H], this rank's share of the sum over ranks.
    """
    gate, up = rowwise_linear(x.float(), expert.w13).chunk(2, dim=1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    hidden = (silu(gate) * up).to(x.dtype)
    return rowwise_linear(hidden.float(), expert.w2)


def combine(partials: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Weighted sum of each token's experts: in float32, in the order j = 0..k-1.

    Args:
        partials: float32 [T, k, H].
        weights: [T, k]; converted to float32.
        out_dtype: of the result, rounded once at the end.

    Returns:
        [T, H].
    """
    total = torch.zeros(partials.shape[0], partials.shape[2], dtype=torch.float32)
    for j in range(partials.shape[1]):
        total += partials[:, j] * weights[:, j, None].float()
    return total.to(out_dtype)
