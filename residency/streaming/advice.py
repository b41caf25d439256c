"""How many tokens a prompt's chunk should have: as many as are computed while a layer's absent rows arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ziggurat.residency.streaming.layers import BLIND_PAIRS_PER_EXPERT

_ROUND_TO = 256


@dataclass(frozen=True, slots=True)
class ChunkAdvice:
    """The smallest chunk at which computing a layer's experts takes as long as streaming those without a slot.

    tokens: for `--max-num-batched-tokens`, a multiple of 256. stream_ms: of one layer, whatever the chunk.
    compute_ms: of one layer for so many tokens. limited: tokens that the kernels compute at once; a layer is streamed
    once for each part of a larger batch, so that a larger chunk gains nothing. 0: they are enough.
    """

    tokens: int
    stream_ms: float
    compute_ms: float
    limited: int = 0

    def line(self) -> str:
        """The advice in one line."""
        text = (
            f"prompts: --max-num-batched-tokens {self.tokens}: a layer's absent experts arrive in "
            f"{self.stream_ms:.2f} ms and {self.tokens} tokens are computed in {self.compute_ms:.2f} ms"
        )
        if self.limited:
            text += (
                f"; the link sets the pace, since kernels compute at most {self.limited} tokens at once and a layer is "
                "streamed for each part of a larger chunk"
            )
        return text


def advise(
    *,
    absent_rows: float,
    stride: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    link: float,
    compute: float,
    part_tokens: int,
) -> ChunkAdvice | None:
    """None if nothing is absent.

    absent_rows: of a layer, on average. stride: bytes of a row. hidden, intermediate: of one rank's experts.
    link: bytes a second. compute: floating-point operations a second of the experts' kernels on large batches.
    part_tokens: tokens that kernels compute at once.
    """
    if absent_rows <= 0:
        return None
    stream = absent_rows * stride / link
    per_token = (
        top_k * 6 * hidden * intermediate / compute
    )  # three matrices, a multiplication and an addition each
    # With fewer pairs the rows of a layer are not known before its routing is.
    least = math.ceil(BLIND_PAIRS_PER_EXPERT * experts / top_k)
    wanted = _rounded(max(least, math.ceil(stream / per_token)))
    most = max(1, part_tokens)
    tokens = min(wanted, most)
    return ChunkAdvice(tokens, stream * 1e3, tokens * per_token * 1e3, most if wanted > most else 0)


def _rounded(tokens: int) -> int:
    return -(-tokens // _ROUND_TO) * _ROUND_TO
