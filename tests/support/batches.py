"""Experts for the batch quantizer that its fast paths cover, and the rows that the codecs give for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from support import weights as source
from ziggurat.kernels.codecs.base import Codec
from ziggurat.kernels.codecs.batch import TiledBatch
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.codecs.tiled import TiledCodec
from ziggurat.kernels.geometry import ExpertGeometry

FORMATS = ("bf16", "fp8_block", "nvfp4", "mxfp4")
KINDS = ("normal", "grid", "fp4 exact", "w2 exact", "powers", "zeros", "sparse")
BLOCKS = ((16, 32), (32, 64), (128, 128), (24, 32), (1, 96))
SIZES = ((32, 32, 1), (64, 32, 1), (160, 64, 2), (96, 192, 3), (256, 128, 2), (128, 256, 4))  # H, I, ranks
GUARD = 0xEE


def tiled(name: str) -> TiledCodec:
    codec = get_codec(name)
    assert isinstance(codec, TiledCodec)
    return codec


def fast_weight(
    rng: np.random.Generator, format: str, N: int, K: int, block: tuple[int, int], name: str = "w"
) -> source.Weight:
    """A weight with ties, exact blocks and zeros of both signs that needs no float64 path."""
    values = source.awkward_values(rng, N, K, KINDS)
    if rng.random() < 0.3:
        values = np.abs(values)  # zeros of one sign, which alternate
    if format == "bf16":
        bits = torch.from_numpy(values).bfloat16()
        small = (bits != 0) & (bits.abs() < 2.0**-39)
        return source.Weight(name, format, (N, K), torch.where(small, 0, bits))
    if format == "fp8_block":
        data = source._e4m3_bytes(rng, values)
        shape = (-(-N // block[0]), -(-K // block[1]))
        scale = torch.from_numpy(2.0 ** rng.uniform(-30, 60, shape)).float()
        kind = rng.integers(4)
        if kind == 0:
            scale = torch.from_numpy(2.0 ** rng.integers(-30, 60, shape)).float()
        elif kind == 1:
            scale = torch.from_numpy(rng.integers(97, 220, shape).astype(np.uint8)).view(torch.float8_e8m0fnu)
        elif kind == 2:
            scale = scale.bfloat16().clamp_min(2.0**-30)
        return source.fp8(data, scale, block, name)
    nibbles = source._nibbles(rng, values)
    pairs = np.ascontiguousarray(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4))
    if format == "mxfp4":
        return source.mxfp4(pairs, rng.integers(0, 253, (N, K // 32)).astype(np.uint8), name)
    scales = rng.integers(0, 127, (N, K // 16))
    if rng.random() < 0.5:
        scales = rng.integers(40, 72, (N, K // 16))
    return source.nvfp4(pairs, scales, float(np.float32(rng.uniform(1e-6, 1e-2))), name)


def fast_expert(
    rng: np.random.Generator, format: str, hidden: int, intermediate: int, block: tuple[int, int]
) -> source.Expert:
    return source.Expert(
        fast_weight(rng, format, intermediate, hidden, block, "w1"),
        fast_weight(rng, format, intermediate, hidden, block, "w3"),
        fast_weight(rng, format, hidden, intermediate, block, "w2"),
    )


def expected_rows(codec: Codec, experts: Sequence[source.Expert], tp_size: int) -> dict[int, torch.Tensor]:
    """By rank uint8 [experts, row_bytes], from the codec itself."""
    whole = ExpertGeometry(experts[0].w1.shape[1], experts[0].w1.shape[0])
    nbytes = codec.row_bytes(whole.shard(tp_size))
    rows = {rank: torch.zeros(len(experts), nbytes, dtype=torch.uint8) for rank in range(tp_size)}
    for i, expert in enumerate(experts):
        codec.encode(expert, tp_size, {rank: of_rank[i] for rank, of_rank in rows.items()})
    return rows


def batch_rows(
    codec: TiledCodec,
    experts: Sequence[source.Expert],
    tp_size: int,
    device: torch.device,
    piece_weights: int,
) -> tuple[dict[int, torch.Tensor], list[int]]:
    """The same from the batch quantizer, and which experts it left; fails if a byte beside the rows is touched."""
    whole = ExpertGeometry(experts[0].w1.shape[1], experts[0].w1.shape[0])
    nbytes = codec.row_bytes(whole.shard(tp_size))
    stride = nbytes + 64 - nbytes % 64
    backing = {r: torch.full((len(experts), stride), GUARD, dtype=torch.uint8) for r in range(tp_size)}
    rows = {rank: of_rank[:, :nbytes] for rank, of_rank in backing.items()}
    odd = TiledBatch(codec, device, piece_weights).encode_to_host(experts, tp_size, rows)
    assert all((of_rank[:, nbytes:] == GUARD).all() for of_rank in backing.values())
    return rows, odd


def check_random_batch(seed: int, format: str, codec_name: str, device: torch.device) -> None:
    """Some experts in small pieces: all are done, and their rows are the codec's on every rank."""
    rng = np.random.default_rng(seed)
    codec = tiled(codec_name)
    hidden, intermediate, tp_size = SIZES[rng.integers(len(SIZES))]
    block = BLOCKS[rng.integers(len(BLOCKS))]
    experts = [fast_expert(rng, format, hidden, intermediate, block) for _ in range(rng.integers(1, 5))]
    if format == "fp8_block" and rng.random() < 0.2:
        experts[0] = replace(experts[0], w1=replace(experts[0].w1, data=torch.zeros_like(experts[0].w1.data)))
    pieces = (1, 1 << 11, 1 << 14, 1 << 18)[rng.integers(4)]
    rows, odd = batch_rows(codec, experts, tp_size, device, pieces)
    assert odd == []
    expected = expected_rows(codec, experts, tp_size)
    for rank, of_rank in rows.items():
        assert torch.equal(of_rank, expected[rank]), rank


def every_bf16(rng: np.random.Generator) -> list[source.Expert]:
    """For each fraction of a block's largest weight all patterns from 12 binades below it; then many exponents."""
    magnitudes = np.arange(((127 - 30) << 7), ((127 + 30) << 7), dtype=np.int64)
    blocks = []
    for top in np.arange(128) + (127 << 7):
        below = np.arange(top - (12 << 7), top + 1)
        below = np.concatenate([below, np.zeros(-len(below) % 31, np.int64)])
        body = below.reshape(-1, 31)
        blocks.append(np.concatenate([np.full((len(body), 1), top), body], axis=1))
    bits = np.concatenate(blocks)
    bits = np.concatenate([bits, np.resize(magnitudes, (-len(bits) % 32, 32))])
    bits |= rng.integers(0, 2, bits.shape) << 15
    return _as_experts("bf16", bits)


def _as_experts(format: str, bits: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[source.Expert]:
    """Blocks [n, 32] as experts of 32 x 32 matrices, all three the same."""
    rows = len(bits) // 32 * 32
    matrices = [source.from_bits(format, bits[i : i + 32]) for i in range(0, rows, 32)]
    return [source.Expert(one, one, one) for one in matrices]


def every_fp8(rng: np.random.Generator, scale: float) -> list[source.Expert]:
    """Every magnitude byte under every largest one of its block, with one scale."""
    blocks = []
    for top in range(127):
        body = np.arange(top + 1)
        body = np.concatenate([body, np.zeros(-len(body) % 31, np.int64)]).reshape(-1, 31)
        blocks.append(np.concatenate([np.full((len(body), 1), top), body], axis=1))
    bits = np.concatenate(blocks)
    bits = np.concatenate([bits, np.zeros((-len(bits) % 32, 32), np.int64)])
    bits |= rng.integers(0, 2, bits.shape) << 7
    scales = torch.full((1, 1), scale)
    matrices = [source.fp8(bits[i : i + 32], scales, (32, 32)) for i in range(0, len(bits), 32)]
    return [source.Expert(one, one, one) for one in matrices]


def every_nvfp4(rng: np.random.Generator, global_scale: float) -> list[source.Expert]:
    """Random nibbles under every scale byte, with others that are near it and far from it in a block's other half."""
    scales = np.array(
        [[a, min(max(a + d, 0), 126)] for a in range(127) for d in (-30, -9, -3, -1, 0, 1, 4, 17)]
    )
    scales = np.concatenate([scales, np.full((-len(scales) % 32, 2), 56)])
    pairs = rng.integers(0, 256, (len(scales), 16)).astype(np.uint8)
    pairs[::3] &= rng.integers(0, 256, (len(pairs[::3]), 1)).astype(np.uint8)  # small largest codes, too
    matrices = [
        source.nvfp4(pairs[i : i + 32], scales[i : i + 32], global_scale) for i in range(0, len(pairs), 32)
    ]
    return [source.Expert(one, one, one) for one in matrices]


def check_all(codec_name: str, experts: Sequence[source.Expert], device: torch.device) -> None:
    codec = tiled(codec_name)
    rows, odd = batch_rows(codec, experts, 1, device, 1 << 16)
    assert odd == []
    assert torch.equal(rows[0], expected_rows(codec, experts, 1)[0])
