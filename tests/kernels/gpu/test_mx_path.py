"""The data path of sm_120, its instruction emulated, against the model on the CPU: bit for bit."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import xxhash

from support import layers, mx_probe
from support.layers import Batch, Layer, same_bits
from ziggurat.kernels.codecs.registry import get_codec
from ziggurat.kernels.codecs.tiled import TiledCodec
from ziggurat.kernels.cpu.block_scaled import multiply_block
from ziggurat.kernels.cpu.mx_layer import DECODE_SPLITS, PREFILL_SPLITS, mx_expert
from ziggurat.kernels.cpu.swiglu import weighted_sum
from ziggurat.kernels.cuda import driver, nvrtc
from ziggurat.kernels.cuda.layer import CudaLayerKernels
from ziggurat.kernels.cuda.library import Library
from ziggurat.kernels.cuda.units import SOURCES, unit
from ziggurat.kernels.geometry import ExpertGeometry

pytestmark = pytest.mark.gpu

TYPES = [(codec, dtype) for codec in ("w2", "fp4") for dtype in (torch.bfloat16, torch.float16)]
#: hidden, intermediate, experts, top_k. K that fills no group of 128, fewer groups than warps, and more.
SHAPES = {"odd": (96, 160, 8, 3), "demo": (256, 128, 16, 4), "wide": (1312, 288, 4, 2)}


def target() -> str:
    major, minor = driver.capability(torch.cuda.current_device())
    return f"sm_{major}{minor}"


@cache
def emulated() -> Library:
    """The kernels with the block-scaled instruction in integer arithmetic.

    They take NVRTC half a minute, so test processes of one machine and one state of the sources share a file.
    """
    what, defines = unit("moe"), ("EMULATE_MX",)
    texts = nvrtc.sources_of(what.source, SOURCES)
    digest = xxhash.xxh3_64_hexdigest(repr((sorted(texts.items()), target(), defines)).encode())
    file = Path(tempfile.gettempdir()) / f"ziggurat-emulated-{digest}.cubin"
    if not file.exists():
        compiled = nvrtc.compile_source(what.source, texts, target(), (*what.defines, *defines))
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
            written.write(compiled.cubin)
        Path(written.name).rename(file)
    return Library(what.name, file.read_bytes())


def mx_kernels(layer: Layer, dtype: torch.dtype, max_tokens: int) -> CudaLayerKernels:
    return CudaLayerKernels(
        layer.codec,
        layer.geometry,
        layer.experts,
        layer.top_k,
        dtype=dtype,
        device=torch.device("cuda", torch.cuda.current_device()),
        max_tokens=max_tokens,
        clamp=layer.clamp,
        mx=True,
        source=emulated(),
    )


def test_one_instruction() -> None:
    """Registers, lanes and scale bytes of the warp-wide emulation, with garbage in every scale that nobody reads."""
    device = torch.cuda.current_device()
    kernel = Library("probe", mx_probe.compiled(target()).cubin).kernel(mx_probe.NAME, device)
    rng = np.random.default_rng(0)
    count = 64
    a = rng.integers(0, 256, (count, 16, 32)).astype(np.uint8)
    b = rng.integers(0, 256, (count, 8, 32)).astype(np.uint8)
    a[a & 0x7C == 0x7C] &= 0x83
    b[b & 0x7F == 0x7F] &= 0x80
    c = rng.standard_normal((count, 16, 8)).astype(np.float32) * np.float32(1000)
    row_scales = rng.integers(110, 140, (count, 16)).astype(np.uint8)
    column_scales = rng.integers(110, 140, (count, 8)).astype(np.uint8)

    lanes = np.arange(32)
    g, t = lanes >> 2, lanes & 3
    a_words, b_words = a.view(np.uint32), b.view(np.uint32)  # [count, rows, 8 words of four k]
    a_registers = np.stack(
        [a_words[:, g, t], a_words[:, g + 8, t], a_words[:, g, 4 + t], a_words[:, g + 8, 4 + t]], axis=-1
    )
    b_registers = np.stack([b_words[:, g, t], b_words[:, g, 4 + t]], axis=-1)
    c_registers = np.stack([c[:, g + 8 * (r >> 1), 2 * t + (r & 1)] for r in range(4)], axis=-1)
    scale_a, scale_b = (rng.integers(0, 256, (count, 32, 4)).astype(np.uint8) for _ in range(2))
    for i in range(count):
        for row in range(16):
            scale_a[i, 4 * (row % 8) + row // 8, i % 4] = row_scales[i, row]
        for column in range(8):
            scale_b[i, 4 * column, i % 4] = column_scales[i, column]

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).cuda()

    arrays = [there(array) for array in (a_registers, b_registers, scale_a, scale_b, c_registers)]
    d = torch.full((count, 32, 4), float("nan"), device="cuda")
    params = mx_probe.ProbeParams(*(array.data_ptr() for array in (*arrays, d)))
    kernel.launch(count, 32, params)
    torch.cuda.synchronize()
    got = d.cpu().numpy()
    for i in range(count):
        expected = multiply_block(c[i], a[i], row_scales[i], b[i], column_scales[i])
        for r in range(4):
            wanted = expected[g + 8 * (r >> 1), 2 * t + (r & 1)]
            np.testing.assert_array_equal(got[i, :, r].view(np.uint32), wanted.view(np.uint32))


def place_in_block(intermediate: int) -> torch.Tensor:
    """Where the kernels keep each hidden channel: within its block of 32, what a lane reads together lies together."""
    c = torch.arange(intermediate)
    j = c & 3
    order = torch.where(j & 1 == 1, j >> 1, 2 + (j >> 1))
    return (c & ~31) + ((c >> 2) & 3) * 8 + ((c >> 4) & 1) * 4 + order


def modelled(layer: Layer, batch: Batch, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden [T k, I], contributions float32 [T k, H] and result [T, H]; zero for ids that are no expert's."""
    geometry: ExpertGeometry = layer.geometry
    tokens, k = batch.ids.shape
    hidden = torch.zeros(tokens * k, geometry.intermediate, dtype=batch.x.dtype)
    partial = torch.zeros(tokens * k, geometry.hidden)
    flat = batch.ids.flatten()
    for e in range(layer.experts):
        pairs = torch.nonzero(flat == e).squeeze(1)
        if len(pairs):
            done = mx_expert(
                batch.x[pairs // k],
                layer.rows[e],
                cast(TiledCodec, get_codec(layer.codec)),
                geometry,
                clamp=layer.clamp,
                splits=splits,
            )
            hidden[pairs], partial[pairs] = done.hidden, done.partial
    present = ((batch.ids >= 0) & (batch.ids < layer.experts)).numpy()
    shares = partial.view(tokens, k, -1).numpy()
    out = torch.from_numpy(weighted_sum(shares, batch.weights.numpy(), present)).to(batch.x.dtype)
    return hidden, partial, out


def contributions(kernels: CudaLayerKernels, count: int) -> torch.Tensor:
    """The first `count` float32 numbers of what is summed last, which the workspace holds as words."""
    return kernels._memory["partial"][:count].view(torch.float32).cpu()


def compare(layer: Layer, batch: Batch, kernels: CudaLayerKernels, splits: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool, slots = layers.placed(layer, device, slots=layer.experts + 4, seed=3)
    kernels.poison()
    there = batch.to(device)
    tokens = len(batch.x)
    live = torch.tensor([tokens], dtype=torch.int32, device=device)
    out = kernels.run(there.x, there.weights, there.ids, slots=slots, pool=pool, live=live).cpu()
    hidden, partial, result = modelled(layer, batch, splits)
    pairs, inner = hidden.shape
    got_hidden = kernels._memory["hidden"][: pairs * inner].view(batch.x.dtype).view(pairs, inner).cpu()
    got_partial = contributions(kernels, partial.numel()).view(partial.shape)
    used = ((batch.ids >= 0) & (batch.ids < layer.experts)).flatten()
    assert same_bits(got_hidden[:, place_in_block(inner)][used], hidden[used])
    assert same_bits(got_partial[used], partial[used])
    assert same_bits(out, result)


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("clamp", [None, 0.75])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_few_tokens(codec: str, dtype: torch.dtype, shape: str, clamp: float | None, outliers: bool) -> None:
    layer = layers.random_layer(codec, *SHAPES[shape], clamp)
    kernels = mx_kernels(layer, dtype, 512)
    for tokens in (1, 3, min(16, kernels._decode_tokens)):
        batch = layers.random_batch(layer, tokens, dtype, seed=tokens, outliers=outliers)
        compare(layer, batch, kernels, DECODE_SPLITS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_many_tokens(codec: str, dtype: torch.dtype, shape: str) -> None:
    layer = layers.random_layer(codec, *SHAPES[shape])
    kernels = mx_kernels(layer, dtype, 512)
    most = kernels._decode_tokens
    for tokens, splits in ((most, DECODE_SPLITS), (most + 1, PREFILL_SPLITS), (2 * most + 9, PREFILL_SPLITS)):
        batch = layers.random_batch(layer, tokens, dtype, outliers=True)
        ids = batch.ids.clone()
        ids[tokens // 2, 0] = -1
        compare(layer, Batch(batch.x, batch.weights, ids), kernels, splits)


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_tokens_of_zeros_and_tiny_ones(codec: str, dtype: torch.dtype) -> None:
    """Blocks of zeros, of subnormal numbers, and of one number among zeros have scales of their own."""
    layer = layers.random_layer(codec, *SHAPES["demo"])
    batch = layers.random_batch(layer, 4, dtype)
    x = batch.x.clone()
    x[0] = 0
    x[1] = torch.finfo(dtype).smallest_normal * 0.25
    x[2, :64] = 0
    x[2, 7] = 3
    compare(layer, Batch(x, batch.weights, batch.ids), mx_kernels(layer, dtype, 8), DECODE_SPLITS)


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_a_nan_stays_with_its_token(codec: str, dtype: torch.dtype) -> None:
    layer = layers.random_layer(codec, *SHAPES["demo"])
    kernels = mx_kernels(layer, dtype, 512)
    device = torch.device("cuda", torch.cuda.current_device())
    pool, slots = layers.placed(layer, device)
    for tokens in (9, 300):
        batch = layers.random_batch(layer, tokens, dtype).to(device)
        live = torch.tensor([tokens], dtype=torch.int32, device=device)

        def run(x: torch.Tensor, batch: Batch = batch, live: torch.Tensor = live) -> torch.Tensor:
            return kernels.run(x, batch.weights, batch.ids, slots=slots, pool=pool, live=live).cpu()

        expected = run(batch.x)
        x = batch.x.clone()
        x[4, 40] = float("nan")
        out = run(x)
        assert out[4].isnan().all()
        keep = torch.arange(tokens) != 4
        assert same_bits(out[keep], expected[keep])


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_numbers_are_near_float64_over_the_same_quantized_activations(codec: str, dtype: torch.dtype) -> None:
    """The contributions, which no 16-bit rounding has touched."""
    for shape in SHAPES:
        layer = layers.random_layer(codec, *SHAPES[shape])
        kernels = mx_kernels(layer, dtype, 512)
        device = torch.device("cuda", torch.cuda.current_device())
        pool, slots = layers.placed(layer, device)
        for tokens in (1, 16, 300):
            batch = layers.random_batch(layer, tokens, dtype, outliers=True)
            there = batch.to(device)
            live = torch.tensor([tokens], dtype=torch.int32, device=device)
            kernels.run(there.x, there.weights, there.ids, slots=slots, pool=pool, live=live)
            partial = contributions(kernels, tokens * layer.top_k * layer.geometry.hidden).double()
            got = (partial.view(tokens, layer.top_k, -1) * batch.weights[..., None].double()).sum(dim=1)
            expected = layers.reference(layer, batch, quantize=layers.mxfp8_of(dtype))
            assert layers.relative_error(got, expected) < 1e-3
