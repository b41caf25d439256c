"""What a layer is called with: whether the model can have produced it, and how often it names each expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.passes import BoolArray, IntArray
from ziggurat.residency.runtime_errors import RoutingError


def check_ids(ids: npt.NDArray[np.integer], experts: int) -> None:
    """RoutingError unless all ids are in 0..experts-1."""
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= experts:
        raise RoutingError(
            f"a token is routed to expert {low if low < 0 else high}, but experts are 0..{experts - 1}"
        )


def check_shapes(
    g: ServiceGeometry,
    layer: int,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    live: int,
    *,
    most: int | None = None,
) -> None:
    """RoutingError unless a call of a layer fits the model and the step's `live` tokens.

    most: rows of the largest batch.
    """
    if not 0 <= layer < g.layers:
        raise RoutingError(f"layer index {layer} does not exist; there are {g.layers} MoE layers")
    if x.dim() != 2 or x.shape[1] != g.hidden:
        raise RoutingError(f"x has shape {tuple(x.shape)}, expected [tokens, {g.hidden}]")
    wanted = (x.shape[0], g.top_k)
    if tuple(topk_ids.shape) != wanted or tuple(topk_weights.shape) != wanted:
        raise RoutingError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be {wanted}"
        )
    if x.shape[0] < live:
        raise RoutingError(f"layer {layer} got {x.shape[0]} tokens in a step of {live} live tokens")
    if most is not None and x.shape[0] > most:
        raise RoutingError(
            f"layer {layer} got {x.shape[0]} tokens, but the largest batch was said to have {most}"
        )


def check_counted(g: ServiceGeometry, invalid: int) -> None:
    """RoutingError if a pass has counted pairs whose id is no expert's."""
    if invalid:
        raise RoutingError(
            f"{invalid} pairs are routed to experts that do not exist; experts are 0..{g.experts - 1}"
        )


def count_pairs(
    ids: npt.NDArray[np.integer], experts: int, prefill: BoolArray | None
) -> tuple[IntArray, IntArray]:
    """Pairs of ids [T, k] routed to each expert, int64 [E]: of all tokens, of those that are not prefill (bool [T]).

    RoutingError if an id is outside 0..experts-1.
    """
    check_ids(ids, experts)
    flat = ids.reshape(-1)
    pairs = np.bincount(flat, minlength=experts)
    return pairs, pairs if prefill is None else np.bincount(ids[~prefill].reshape(-1), minlength=experts)
