"""Reference Mixture-of-Experts operations on the CPU, in float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

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
        float32 [P, H]: of an expert that tensor parallelism divides, this rank's share of the sum over ranks.
    """
    both = rowwise_linear(x.float(), expert.w13).numpy()
    gate, up = np.split(both, 2, axis=1)
    if clamp is not None:
        gate, up = np.minimum(gate, np.float32(clamp)), np.clip(up, np.float32(-clamp), np.float32(clamp))
    with np.errstate(over="ignore", invalid="ignore"):
        hidden = torch.from_numpy(_silu(gate) * up).to(x.dtype)
    return rowwise_linear(hidden.float(), expert.w2)


def _silu(gate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """gate * sigmoid(gate), the same bits at every place of an array.

    numpy's exp is one algorithm for all elements. torch computes the last few of an array, and the last few of each
    thread's share, with another exp than the rest, so that a token's result would depend on its place.
    """
    # exp(-gate) is infinite below -88, and the quotient then -0; an input that is not finite stays so.
    with np.errstate(over="ignore", invalid="ignore"):
        divisor = np.exp(-np.ascontiguousarray(gate))
        divisor += 1
        result: npt.NDArray[np.float32] = np.divide(gate, divisor)
    return result


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
