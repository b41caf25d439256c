"""A model of the layer kernels for block-scaled matrix instructions: what sm_120 computes, to the bit.

MXFP8 activations times the codes of w2 and fp4 rows as E5M2 numbers, hidden activations rounded to the activations'
16-bit type and quantized in turn. The kernels for few tokens divide K among their warps; those for many do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ziggurat.kernels.codecs.base import Section
from ziggurat.kernels.codecs.layout import TILE_K, TILE_ROWS, read_scales, read_words
from ziggurat.kernels.codecs.tiled import TiledCodec
from ziggurat.kernels.cpu.block_scaled import F32, matmul
from ziggurat.kernels.cpu.mxfp8 import quantize_mxfp8
from ziggurat.kernels.cpu.swiglu import swiglu
from ziggurat.kernels.formats import U8, U32
from ziggurat.kernels.geometry import ExpertGeometry

#: Warps that share K in the kernels for few tokens (DECODE_WARPS in kernels/cuda/src/decode.cuh) and for many.
DECODE_SPLITS: Final = 4
PREFILL_SPLITS: Final = 1


@dataclass(frozen=True, slots=True)
class MxExpert:
    """One expert's share of a layer.

    Attributes:
        hidden: [P, I] in the activations' type.
        partial: float32 [P, H], without the router's weight.
    """

    hidden: torch.Tensor
    partial: torch.Tensor


def mx_expert(
    x: torch.Tensor,
    row: torch.Tensor,
    codec: TiledCodec,
    geometry: ExpertGeometry,
    *,
    clamp: float | None = None,
    splits: int = DECODE_SPLITS,
) -> MxExpert:
    """One expert's feed-forward network.

    Args:
        x: [P, H] bfloat16 or float16, on the CPU.
        row: the expert's row, uint8.
        codec: w2 or fp4.
        splits: DECODE_SPLITS or PREFILL_SPLITS.
    """
    payload = row.numpy()
    codes13, scales13, codes2, scales2 = (_section(payload, s) for s in codec.sections(geometry))
    post = np.float32(8.0 if codec.grid.words == 1 else 2.0**14)
    both = _product(x, codes13, scales13, geometry.w13_shape, codec.grid.words, splits) * post
    gate, up = np.split(both, 2, axis=1)
    hidden = torch.from_numpy(swiglu(gate, up, clamp)).to(x.dtype)
    partial = _product(hidden, codes2, scales2, geometry.w2_shape, codec.grid.words, splits) * post
    return MxExpert(hidden, torch.from_numpy(partial))


def operand_a(codes: U8, words: int) -> U8:
    """Code plane words as operand A: E5M2 bytes [tiles, 16, K/32, 32] of lane words [tiles, 8, 4, K/32].

    Worth level * 2^-3 (one word a lane) or value * 2^-14 (two words).
    """
    lanes: U32 = codes
    if words == 1:
        registers = [(lanes << np.uint32(r)) & 0x88888888 | 0x30303030 for r in range(4)]
    else:
        registers = []
        for half in (lanes.astype(np.uint32), (lanes >> np.uint64(32)).astype(np.uint32)):
            registers.append(half & 0x8E8E8E8E)
            registers.append((half << np.uint32(7)) & 0x80808080 | (half >> np.uint32(3)) & 0x0E0E0E0E)
    tiles, _, _, k_tiles = lanes.shape
    out = np.empty((tiles, 2, 8, k_tiles, 2, 4, 4), np.uint8)  # row half, g, k-tile, k half, t, byte
    for r, register in enumerate(registers):
        bytes_ = (
            np.ascontiguousarray(register.astype(np.uint32)).view(np.uint8).reshape(tiles, 8, 4, k_tiles, 4)
        )
        out[:, r & 1, :, :, r >> 1] = bytes_.transpose(0, 1, 3, 2, 4)
    return out.reshape(tiles, TILE_ROWS, k_tiles, TILE_K)


def _section(payload: U8, section: Section) -> U8:
    part: U8 = payload[section.offset : section.offset + section.nbytes]
    return part


def _product(x: torch.Tensor, codes: U8, scales: U8, shape: tuple[int, int], words: int, splits: int) -> F32:
    rows, cols = shape
    lanes = read_words(codes, rows // TILE_ROWS, cols // TILE_K, np.uint32 if words == 1 else np.uint64)
    a = operand_a(lanes, words).reshape(rows, cols)
    b, b_scales = quantize_mxfp8(x.float().numpy())
    return matmul(a, read_scales(scales, rows, cols // TILE_K), b, b_scales, splits=splits)
