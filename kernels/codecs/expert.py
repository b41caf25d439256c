"""What every codec checks before it reads or writes: the expert's matrices agree, the buffers are right."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ziggurat.kernels.codecs.base import ExpertSource
from ziggurat.kernels.errors import CodecError
from ziggurat.kernels.formats import U8
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.sources import SourceArrays


def opened_expert(
    expert: ExpertSource,
) -> tuple[tuple[SourceArrays, SourceArrays, SourceArrays], ExpertGeometry]:
    """The matrices w1, w3, w2 of a whole expert, and its sizes.

    Raises:
        CodecError: their shapes do not belong together.
        NonFiniteWeightError: a scale is NaN or infinite.
    """
    sources = SourceArrays(expert.w1), SourceArrays(expert.w3), SourceArrays(expert.w2)
    rows, cols = sources[0].rows, sources[0].cols
    for source, shape in zip(sources[1:], ((rows, cols), (cols, rows)), strict=True):
        if (source.rows, source.cols) != shape:
            raise CodecError(
                f"tensor {source.name} is [{source.rows}, {source.cols}], but {sources[0].name} of the same expert is "
                f"[{rows}, {cols}], so it must be {list(shape)}"
            )
    return sources, ExpertGeometry(hidden=cols, intermediate=rows)


def row_arrays(outs: Mapping[int, torch.Tensor], tp_size: int, nbytes: int) -> dict[int, U8]:
    """Writable views of the buffers to fill.

    Raises:
        CodecError: a rank out of range, or a buffer that is not contiguous CPU uint8 of ``nbytes``.
    """
    rows: dict[int, U8] = {}
    for rank, out in outs.items():
        if not 0 <= rank < tp_size:
            raise CodecError(f"rank {rank} does not exist with tensor-parallel size {tp_size}")
        if (
            out.dtype != torch.uint8
            or out.device.type != "cpu"
            or tuple(out.shape) != (nbytes,)
            or not out.is_contiguous()
        ):
            raise CodecError(
                f"the buffer of rank {rank} must be contiguous CPU uint8 [{nbytes}], "
                f"not {out.dtype} {list(out.shape)} on {out.device}"
            )
        rows[rank] = out.numpy()
    return rows


def row_payload(row: torch.Tensor, nbytes: int) -> U8:
    """The first ``nbytes`` bytes of a row.

    Raises:
        CodecError: not a one-dimensional contiguous CPU uint8 tensor of at least that length.
    """
    if (
        row.dtype != torch.uint8
        or row.device.type != "cpu"
        or row.dim() != 1
        or row.numel() < nbytes
        or not row.is_contiguous()
    ):
        raise CodecError(
            f"a row must be contiguous CPU uint8 of at least {nbytes} bytes, "
            f"not {row.dtype} {list(row.shape)} on {row.device}"
        )
    payload: U8 = np.asarray(row.numpy())[:nbytes]
    return payload
