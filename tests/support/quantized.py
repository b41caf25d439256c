"""Quantizers of the checkpoint formats, plain and slow, written independently of the code under test."""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP8_MAX = 448.0


def quantize(value: torch.Tensor, format: str, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """One expert matrix [N, K] as a checkpoint of that format stores it: tensor-name suffix -> tensor."""
    if format in ("bf16", "f16", "f32"):
        return {"weight": value.contiguous()}
    if format == "fp8_block":
        return fp8_block(value.float(), block)
    if format == "nvfp4":
        return nvfp4(value.float())
    if format == "mxfp4":
        return mxfp4(value.float())
    raise ValueError(format)


def fp8_block(value: torch.Tensor, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """e4m3 with one f32 factor per block."""
    (n, k), (bn, bk) = value.shape, block
    scale = torch.ones(-(-n // bn), -(-k // bk))
    out = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * bn, (i + 1) * bn), slice(j * bk, (j + 1) * bk))
            largest = value[at].abs().max()
            if largest > 0:
                scale[i, j] = largest / _FP8_MAX
            out[at] = (value[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": out, "weight_scale_inv": scale}


def nvfp4(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """e2m1, an e4m3 factor per 16 columns, and one f32 factor; with the input_scale that ModelOpt adds."""
    n, k = value.shape
    groups = value.view(n, k // 16, 16)
    second = (value.abs().max() / (6.0 * _FP8_MAX)).clamp_min(1e-12)
    scale = (groups.abs().amax(-1) / 6.0 / second).to(torch.float8_e4m3fn)
    factor = scale.float() * second
    codes = e2m1_codes(groups / factor.clamp_min(1e-20).unsqueeze(-1)).view(n, k)
    return {
        "weight": pack_nibbles(codes),
        "weight_scale": scale,
        "weight_scale_2": second.clone(),
        "input_scale": torch.tensor(0.25),
    }


def mxfp4(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """e2m1 and a power of two per 32 columns (e8m0)."""
    n, k = value.shape
    groups = value.view(n, k // 32, 32)
    exponent = (torch.log2(groups.abs().amax(-1).clamp_min(1e-30)).floor() - 2).clamp(-127, 127)
    codes = e2m1_codes(groups / torch.exp2(exponent).unsqueeze(-1)).view(n, k)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": pack_nibbles(codes), "weight_scale": scale}


def e2m1_codes(value: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code of each number, the sign in bit 3."""
    magnitude = (value.abs().unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)
    return magnitude | (torch.signbit(value).to(torch.uint8) << 3)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes -> uint8 [N, K/2]; the low nibble is the even column."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
