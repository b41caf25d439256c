"""Source weights for tests: every checkpoint format, filled with the values that quantizers get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from support import scalar_codec as scalar

FORMATS = ("bf16", "f16", "f32", "fp8_block", "nvfp4", "mxfp4")


@dataclass(frozen=True)
class Weight:
    """Satisfies kernels' SourceWeight."""

    name: str
    format: str
    shape: tuple[int, int]
    data: torch.Tensor
    scale: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Expert:
    """Satisfies kernels' ExpertSource."""

    w1: Weight
    w3: Weight
    w2: Weight


def from_bits(format: str, bits: npt.NDArray[Any], name: str = "w") -> Weight:
    """An unscaled weight of bf16, f16 or f32 bit patterns [N, K]."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
    integers = np.ascontiguousarray(bits.astype({"f32": np.uint32}.get(format, np.uint16)))
    return Weight(name, format, (bits.shape[0], bits.shape[1]), torch.from_numpy(integers).view(dtype))


def fp8(data: npt.NDArray[Any], scale: torch.Tensor, block: tuple[int, int], name: str = "w") -> Weight:
    elements = torch.from_numpy(np.ascontiguousarray(data.astype(np.uint8))).view(torch.float8_e4m3fn)
    return Weight(name, "fp8_block", (data.shape[0], data.shape[1]), elements, scale, None, block)


def nvfp4(pairs: npt.NDArray[Any], scale: npt.NDArray[Any], scale_2: float, name: str = "w") -> Weight:
    shape = (pairs.shape[0], 2 * pairs.shape[1])
    scales = torch.from_numpy(np.ascontiguousarray(scale.astype(np.uint8))).view(torch.float8_e4m3fn)
    return Weight(
        name, "nvfp4", shape, torch.from_numpy(pairs), scales, torch.tensor(scale_2, dtype=torch.float32)
    )


def mxfp4(pairs: npt.NDArray[Any], scale: npt.NDArray[Any], name: str = "w") -> Weight:
    shape = (pairs.shape[0], 2 * pairs.shape[1])
    return Weight(name, "mxfp4", shape, torch.from_numpy(pairs), torch.from_numpy(scale))


def scalar_values(weight: Weight) -> list[list[scalar.Weight]]:
    """The numbers of a finite weight by the scalar implementation."""
    N, K = weight.shape
    data = weight.data.contiguous()
    if weight.format in ("bf16", "f16", "f32"):
        read = {"bf16": scalar.bf16, "f16": scalar.f16, "f32": scalar.f32}[weight.format]
        view = torch.uint32 if weight.format == "f32" else torch.uint16
        return [[finite(read(b)) for b in row] for row in data.view(view).numpy().tolist()]
    assert weight.scale is not None
    bits = data.view(torch.uint8).tolist()
    if weight.format == "fp8_block":
        assert weight.block is not None
        bn, bk = weight.block
        scales = scale_values(weight.scale)
        return [
            [scalar.times(finite(scalar.e4m3(bits[n][k])), scales[n // bn][k // bk]) for k in range(K)]
            for n in range(N)
        ]
    nibbles = [[(byte >> (4 * half)) & 15 for byte in row for half in (0, 1)] for row in bits]
    scale_bits = weight.scale.view(torch.uint8).tolist()
    if weight.format == "mxfp4":
        factors = [[(exponent(b), False) for b in row] for row in scale_bits]
        width = 32
    else:
        assert weight.scale_2 is not None
        common = finite(scalar.f32(int(weight.scale_2.view(torch.int32).item()) & 0xFFFFFFFF))
        factors = [[scalar.times(finite(scalar.e4m3(b)), common) for b in row] for row in scale_bits]
        width = 16
    return [
        [scalar.times(scalar.e2m1(nibbles[n][k]), factors[n][k // width]) for k in range(K)] for n in range(N)
    ]


def scale_values(scale: torch.Tensor) -> list[list[scalar.Weight]]:
    if scale.dtype == torch.float8_e8m0fnu:
        return [[(exponent(b), False) for b in row] for row in scale.view(torch.uint8).tolist()]
    if scale.dtype == torch.bfloat16:
        return [[finite(scalar.bf16(b)) for b in row] for row in scale.view(torch.uint16).numpy().tolist()]
    return [
        [finite(scalar.f32(b)) for b in row] for row in scale.contiguous().view(torch.uint32).numpy().tolist()
    ]


def finite(value: scalar.Weight | None) -> scalar.Weight:
    assert value is not None
    return value


def exponent(byte: int) -> Any:
    value = scalar.e8m0(byte)
    assert value is not None
    return value


# --- random weights that meet the rules' corners ----------------------------------------------------------------------

KINDS = ("normal", "grid", "fp4 exact", "w2 exact", "powers", "zeros", "sparse", "tiny", "wild")


def awkward_values(
    rng: np.random.Generator, N: int, K: int, kinds: tuple[str, ...] = KINDS
) -> npt.NDArray[np.float64]:
    """Float64 [N, K], each block of 32 of a random kind: ties, exact blocks, zeros of both signs, extremes."""
    values = np.empty((N, K // 32, 32))
    for n in range(N):
        for b in range(K // 32):
            kind = kinds[rng.integers(len(kinds))]
            sign = rng.choice([-1.0, 1.0], 32)
            scale = 2.0 ** int(rng.integers(-12, 8))
            if kind == "normal":
                block = rng.standard_normal(32) * scale
            elif kind == "grid":  # quarters up to 8 hit every midpoint, and saturate
                block = sign * rng.integers(0, 33, 32) / 4 * scale
            elif kind == "fp4 exact":
                block = sign * rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6][: rng.integers(2, 9)], 32) * scale
            elif kind == "w2 exact":
                block = sign * rng.choice([1.0, 4.0][: rng.integers(1, 3)], 32) * scale
            elif kind == "powers":
                block = sign * 2.0 ** rng.integers(-8, 4, 32) * scale
            elif kind == "zeros":
                block = sign * 0.0
            elif kind == "sparse":
                block = sign * np.where(rng.random(32) < 0.9, 0.0, rng.standard_normal(32)) * scale
            elif kind == "tiny":
                block = sign * rng.random(32) * 2.0 ** int(rng.integers(-140, -20))
            else:
                block = sign * rng.random(32) * 2.0 ** rng.integers(-60, 100, 32)
            values[n, b] = block
    return values.reshape(N, K)


def awkward_weight(rng: np.random.Generator, format: str, N: int, K: int, name: str = "w") -> Weight:
    """A finite weight of a format with such values, and with random bit patterns of the format here and there."""
    values = awkward_values(rng, N, K)
    if format in ("bf16", "f16", "f32"):
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
        tensor = torch.from_numpy(values).float().to(dtype)
        tensor = torch.where(tensor.isfinite(), tensor, torch.ones_like(tensor))
        return Weight(name, format, (N, K), tensor)
    if format == "fp8_block":
        bn, bk = [(16, 32), (32, 64), (128, 128), (24, 32), (7, 5), (1, 96), (N, K)][rng.integers(7)]
        shape = (-(-N // bn), -(-K // bk))
        return fp8(_e4m3_bytes(rng, values), awkward_scales(rng, shape), (bn, bk), name)
    nibbles = _nibbles(rng, values)
    pairs = np.ascontiguousarray(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))
    if format == "mxfp4":
        return mxfp4(pairs, rng.integers(0, 253, (N, K // 32)).astype(np.uint8), name)
    scales = rng.integers(0, 127, (N, K // 16))
    kind = rng.integers(4)
    if kind == 0:
        scales = rng.integers(40, 72, (N, K // 16))
    elif kind == 1:
        scales |= (rng.random(scales.shape) < 0.1).astype(np.int64) << 7
    scale_2 = float(
        np.float32([rng.random() * 1e-3, 2.0 ** -int(rng.integers(0, 60)), 1.0, -0.3][rng.integers(4)])
    )
    return nvfp4(pairs, scales, scale_2, name)


def awkward_scales(rng: np.random.Generator, shape: tuple[int, int]) -> torch.Tensor:
    kind = rng.integers(6)
    if kind == 0:
        return torch.from_numpy(rng.integers(90, 140, shape).astype(np.uint8)).view(torch.float8_e8m0fnu)
    if kind == 1:
        return torch.from_numpy(rng.random(shape)).bfloat16()
    if kind == 2:
        return torch.from_numpy(2.0 ** rng.integers(-20, 4, shape)).float()
    if kind == 3:
        return torch.from_numpy(rng.standard_normal(shape) * (rng.random(shape) < 0.9)).float()
    if kind == 4:
        return torch.from_numpy(2.0 ** rng.uniform(-149, 60, shape)).float()
    return torch.from_numpy(rng.random(shape) * 1e-3 + 1e-6).float()


def _e4m3_bytes(rng: np.random.Generator, values: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    blocks = values.reshape(values.shape[0], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    reach = 2.0 ** np.floor(np.log2(np.where(top == 0, 1.0, top)))
    inside = torch.from_numpy(blocks / reach * 2.0 ** rng.integers(-9, 8, reach.shape)).float()
    data = (
        inside.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape).copy()
    )
    noise = rng.integers(0, 256, values.shape)
    noise = np.where(noise & 0x7F == 0x7F, 0, noise)
    return np.where(rng.random((values.shape[0], 1)) < 0.2, noise, data)


def _nibbles(rng: np.random.Generator, values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    magnitude = rng.integers(0, 8, values.shape)
    magnitude = np.where(rng.random(values.shape) < 0.3, 0, magnitude)
    return (magnitude | (np.signbit(values).astype(np.int64) << 3)).astype(np.uint8)


def awkward_expert(rng: np.random.Generator, format: str, hidden: int, intermediate: int) -> Expert:
    return Expert(
        w1=awkward_weight(rng, format, intermediate, hidden, "layers.0.experts.0.w1.weight"),
        w3=awkward_weight(rng, format, intermediate, hidden, "layers.0.experts.0.w3.weight"),
        w2=awkward_weight(rng, format, hidden, intermediate, "layers.0.experts.0.w2.weight"),
    )
