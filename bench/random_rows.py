"""Packed experts out of random bytes: as fast to make as memory is to fill, and finite wherever they are multiplied.

Codes of `w2` and `fp4` may be any byte. Their scale bytes are drawn from two neighbouring powers of two, so that a
weight's size is about K^-0.5 and a layer neither fades nor blows up; `bf16` rows get exponents around the same size.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.geometry import ExpertGeometry

#: Root mean square of the values that a random code stands for: levels 1 and 4; e2m1's eight magnitudes.
_CODE_RMS = {"w2": math.sqrt(17 / 2), "fp4": math.sqrt(68.5 / 8)}
_BIAS = 127


def random_rows(
    codec_name: str, geometry: ExpertGeometry, count: int, stride: int, device: torch.device, seed: int = 0
) -> torch.Tensor:
    """uint8 [count, stride] on `device`, no two rows alike; the same bytes for the same arguments.

    What lies behind the payload of a row is 0xFF, which is NaN in every codec.
    """
    codec = get_codec(codec_name)
    rows = _random_bytes(count * stride, device, seed).view(count, stride)
    for section in codec.sections(geometry):
        matrix, _, part = section.name.partition(" ")
        inputs = (geometry.w13_shape if matrix == "w13" else geometry.w2_shape)[1]
        piece = rows[:, section.offset : section.offset + section.nbytes]
        if part == "scales":
            base = _BIAS + round(math.log2(inputs**-0.5 / _CODE_RMS[codec_name]))
            piece.bitwise_and_(1).add_(base - 1)
        elif codec_name == "bf16":
            _limit_exponents(piece, inputs)
    rows[:, codec.row_bytes(geometry) :] = 0xFF
    return rows


def _limit_exponents(piece: torch.Tensor, inputs: int) -> None:
    """Turn random bytes into bfloat16 of both signs, magnitudes within a factor of four around inputs^-0.5."""
    # A bfloat16 is sign | exponent (8 bits) | mantissa (7 bits): the exponent's lowest bit is the low byte's top bit,
    # and stays random.
    exponent = (_BIAS + round(math.log2(inputs**-0.5))) // 2 * 2
    piece[:, 1::2].bitwise_and_(0x80).bitwise_or_(exponent >> 1)


def _random_bytes(count: int, device: torch.device, seed: int) -> torch.Tensor:
    words = -(-count // 8)
    if device.type == "cpu":
        numbers = np.random.Generator(np.random.SFC64(seed)).integers(0, 2**64, words, dtype=np.uint64)
        return torch.from_numpy(numbers.view(np.uint8))[:count]
    generator = torch.Generator(device=device).manual_seed(seed)
    numbers64 = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator, device=device)
    return numbers64.view(torch.uint8)[:count]
