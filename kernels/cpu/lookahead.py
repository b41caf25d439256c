"""The rules of `ziggurat.kernels.lookahead` on the CPU, one at a time: what the CUDA kernels are compared with.

Here a fetch is over before the next layer begins, so every row that was guessed has arrived, in all its chunks.
"""

from __future__ import annotations

import torch

from ziggurat.kernels.admission import ABSENT, CLOCK, COPIES, Admission
from ziggurat.kernels.lookahead import (
    CALLED_OFF,
    CHUNK_BYTES,
    COUNT,
    FETCHED,
    GUESSED,
    MATCHED,
    MOST_TOKENS,
    SPARES,
    USED,
    VALID,
    Lookahead,
    tag,
)

__all__ = ["choose", "copy_rows_ahead", "fetch"]


def choose(
    lookahead: Lookahead, admission: Admission, layer: int, ids: torch.Tensor, live: torch.Tensor
) -> None:
    """Note which guessed rows of layer number `layer` are to be fetched. ids: integers [T, N], T up to MOST_TOKENS.
    live: int32 [1]."""
    assert len(ids) <= MOST_TOKENS
    table, first = admission.table[layer].tolist(), layer * admission.experts
    chosen: dict[int, int] = {}  # key -> place
    for expert in ids[: int(live[0])].T.reshape(-1).tolist():
        if len(chosen) < SPARES and 0 <= expert < admission.experts and table[expert] == ABSENT:
            place = int(admission.places[first + expert])
            if place >= 0:
                chosen.setdefault(first + expert, place)
    for number, (key, place) in enumerate(chosen.items()):
        lookahead.rows[number] = torch.tensor([place, key])
    lookahead.words[COUNT] = len(chosen)
    lookahead.words[GUESSED] += len(chosen)
    lookahead.words[VALID] = _tag(admission, layer)


def fetch(lookahead: Lookahead, admission: Admission) -> None:
    """Bring the chosen rows."""
    for number, (place, _) in enumerate(_rows(lookahead)):
        lookahead.spare[number] = admission.arena[place]
        lookahead.words[FETCHED] += _chunks(lookahead)


def copy_rows_ahead(lookahead: Lookahead, admission: Admission, layer: int) -> None:
    """Copy the rows of layer number `layer`, admitted last, to the pool: from spares, where they are, or the arena."""
    lookahead.words[CALLED_OFF] = now = _tag(admission, layer)
    valid = int(lookahead.words[VALID]) == now
    spares = {place: number for number, (place, _) in enumerate(_rows(lookahead))} if valid else {}
    for place, slot in admission.copies[: int(admission.state[COPIES])].tolist():
        number = spares.get(place)
        admission.pool[slot] = admission.arena[place] if number is None else lookahead.spare[number]
        if number is not None:
            lookahead.words[MATCHED] += 1
            lookahead.words[USED] += _chunks(lookahead)


def _tag(admission: Admission, layer: int) -> int:
    return tag(int(admission.state[CLOCK]), admission.layers, layer)


def _chunks(lookahead: Lookahead) -> int:
    return -(-lookahead.spare.shape[1] // CHUNK_BYTES)


def _rows(lookahead: Lookahead) -> list[list[int]]:
    return lookahead.rows[: int(lookahead.words[COUNT])].tolist()
