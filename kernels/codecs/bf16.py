"""The verbatim codec: row-major bfloat16, w13 then w2, so that any bfloat16 model can be tiered without loss."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
import torch

from ziggurat.kernels.codecs.base import DecodedExpert, ExpertSource, Section
from ziggurat.kernels.codecs.expert import opened_expert, row_arrays, row_payload
from ziggurat.kernels.codecs.rounding import bf16_rows
from ziggurat.kernels.formats import U16
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.sources import SourceArrays

_WEIGHTS = 1 << 18


class Bf16Codec:
    """Rows of bfloat16: the bytes of a bfloat16 checkpoint; other sources rounded to nearest, ties to even."""

    name: Final = "bf16"
    version: Final = "half-even-1/row-major-1"

    def check(self, geometry: ExpertGeometry) -> None:
        """Every size fits."""

    def row_bytes(self, geometry: ExpertGeometry) -> int:
        return 6 * geometry.hidden * geometry.intermediate

    def sections(self, geometry: ExpertGeometry) -> tuple[Section, ...]:
        down = 2 * geometry.hidden * geometry.intermediate
        return Section("w13", 0, 2 * down), Section("w2", 2 * down, down)

    def encode(self, expert: ExpertSource, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        (w1, w3, w2), whole = opened_expert(expert)
        geometry = whole.shard(tp_size)
        rows = row_arrays(outs, tp_size, self.row_bytes(geometry))
        inner = geometry.intermediate
        jobs = []
        for source in (w1, w3, w2):
            for first in range(0, source.rows, step := max(1, _WEIGHTS // source.cols)):
                last = min(first + step, source.rows)
                targets = []
                for rank, row in rows.items():
                    w13_out = row[: 4 * geometry.hidden * inner].view(np.uint16).reshape(2, inner, -1)
                    w2_out = row[4 * geometry.hidden * inner :].view(np.uint16).reshape(-1, inner)
                    if source is w2:
                        targets.append(
                            (slice(0, None), slice(rank * inner, (rank + 1) * inner), w2_out[first:last])
                        )
                        continue
                    begin, end = max(first, rank * inner), min(last, (rank + 1) * inner)
                    if begin < end:
                        out = w13_out[0 if source is w1 else 1, begin - rank * inner : end - rank * inner]
                        targets.append((slice(begin - first, end - first), slice(0, None), out))
                jobs.append(partial(_encode_rows, source, first, last, targets))
        for job in jobs:
            job()

    def decode(self, row: torch.Tensor, geometry: ExpertGeometry) -> DecodedExpert:
        payload = row_payload(row, self.row_bytes(geometry)).view(np.uint16)
        out = torch.empty(payload.size)
        # The upper half of a float32 is the bfloat16: widening and shifting into place is the whole conversion.
        np.left_shift(payload, np.uint32(16), out=out.numpy().view(np.uint32), dtype=np.uint32)
        down = payload.size // 3 * 2
        return DecodedExpert(w13=out[:down].view(geometry.w13_shape), w2=out[down:].view(geometry.w2_shape))


def _encode_rows(
    source: SourceArrays, first: int, last: int, targets: list[tuple[slice, slice, U16]]
) -> None:
    bits = bf16_rows(source, first, last)
    for rows, cols, out in targets:
        out[...] = bits[rows, cols]
