"""The CUDA kernels against float64 over the same rows, in the shapes of models in the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support import layers
from support.layer_kernels import TYPES, Subject, subject
from support.layers import Batch, Layer, same_bits
from support.weights import Expert, Weight
from ziggurat.kernels.cuda import workspace
from ziggurat.kernels.cuda.layer import CudaLayerKernels
from ziggurat.kernels.geometry import ExpertGeometry

pytestmark = pytest.mark.gpu

#: hidden, intermediate, experts, top_k: the demo model; sizes that fill no group of 128 k; many small experts;
#: DeepSeek-V4-Flash's and GLM-5.2's experts, fewer of them.
SHAPES = {
    "demo": (256, 128, 32, 4),
    "odd": (96, 160, 8, 3),
    "tail": (1056, 416, 12, 2),
    "fine": (128, 96, 128, 4),
    "deepseek-v4-flash": (4096, 2048, 16, 6),
    "glm-5.2": (6144, 2048, 12, 8),
}
TOKENS = (1, 2, 3, 8, 16, 17, 33, 64, 100, 257)
DEMO = Path(__file__).resolve().parents[3] / "bench" / "models" / "demo-moe-fp8"

#: Relative error of all batches together, and of a single one. Rounding hidden activations and result to bfloat16 costs
#: 2.3e-3 on average, to float16 an eighth of that.
TOGETHER = {torch.bfloat16: 3e-3, torch.float16: 6e-4}
SINGLE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


def kernels_of(given: Subject) -> CudaLayerKernels:
    assert isinstance(given.kernels, CudaLayerKernels)
    return given.kernels


def poisoned_run(given: Subject, batch: Batch) -> torch.Tensor:
    """A run that finds NaN where nothing was written: in the workspace, and where its result is likely to lie."""
    kernels_of(given).poison()
    places = [torch.full_like(batch.x, float("nan"), device=given.device) for _ in range(4)]
    del places
    return given.run(batch)


def check(given: Subject, seed: int, outliers: bool) -> None:
    """All batch sizes: the error, and every element written."""
    difference = size = 0.0
    for tokens in TOKENS:
        batch = layers.random_batch(given.layer, tokens, given.dtype, seed=seed + tokens, outliers=outliers)
        expected = layers.reference(given.layer, batch.to(given.device)).cpu()
        got = poisoned_run(given, batch)
        assert got.isfinite().all(), f"{tokens} tokens"
        error = layers.relative_error(got, expected)
        print(f"{given.layer.codec} {given.dtype} T={tokens} outliers={outliers}: {error:.2e}")
        assert error < SINGLE[given.dtype], f"{tokens} tokens"
        difference += float((got.double() - expected).square().sum())
        size += float(expected.square().sum())
    assert (difference / size) ** 0.5 < TOGETHER[given.dtype]


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_random_experts(codec: str, dtype: torch.dtype, shape: str, outliers: bool) -> None:
    check(subject("cuda", layers.random_layer(codec, *SHAPES[shape]), dtype, max(TOKENS)), 0, outliers)


@pytest.mark.parametrize("clamp", [0.5, 7.0])
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_clamped_swiglu(codec: str, dtype: torch.dtype, clamp: float) -> None:
    check(subject("cuda", layers.random_layer(codec, *SHAPES["demo"], clamp), dtype, max(TOKENS)), 1, True)


def trained_layer(codec: str, number: int) -> Layer:
    """One layer of the demo model, packed from its FP8 checkpoint."""
    with (DEMO / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header, data = json.loads(file.read(size)), bytearray(file.read())
    types = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}

    def tensor(name: str) -> torch.Tensor:
        entry = header[name]
        begin, end = entry["data_offsets"]
        return torch.frombuffer(data[begin:end], dtype=types[entry["dtype"]]).reshape(entry["shape"])

    def weight(name: str) -> Weight:
        values = tensor(f"{name}.weight")
        shape = (values.shape[0], values.shape[1])
        scale = tensor(f"{name}.weight_scale_inv")
        return Weight(name, "fp8_block", shape, values, scale, block=(128, 128))

    def expert(e: int) -> Expert:
        name = f"model.layers.{number}.mlp.experts.{e}"
        return Expert(*(weight(f"{name}.{part}_proj") for part in ("gate", "up", "down")))

    hidden, intermediate, experts, top_k = SHAPES["demo"]
    return layers.pack(codec, ExpertGeometry(hidden, intermediate), top_k, map(expert, range(experts)))


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_trained_experts(codec: str, dtype: torch.dtype, outliers: bool) -> None:
    check(subject("cuda", trained_layer(codec, 3), dtype, max(TOKENS)), 2, outliers)


@pytest.mark.parametrize(("codec", "dtype"), TYPES)
def test_numbers_at_the_ends_of_the_type(codec: str, dtype: torch.dtype) -> None:
    """Activations that float16 operands hold only under a scale of their own."""
    given = subject("cuda", layers.random_layer(codec, *SHAPES["demo"]), dtype, 64)
    for factor in (2.0**-4, 2.0**3) if dtype is torch.float16 else (2.0**-50, 2.0**-20, 2.0**40):
        batch = layers.random_batch(given.layer, 16, dtype)
        batch = Batch((batch.x.double() * factor).to(dtype), batch.weights, batch.ids)
        assert (
            layers.relative_error(poisoned_run(given, batch), layers.reference(given.layer, batch))
            < SINGLE[dtype]
        )


@pytest.mark.parametrize("codec", ["w2", "bf16"])
def test_a_batch_larger_than_the_workspace_is_computed_in_parts(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layers.random_layer(codec, *SHAPES["demo"])
    whole = subject("cuda", layer, torch.bfloat16, 1000)
    monkeypatch.setattr(workspace, "PARTIAL_BYTES", 1)
    parts = subject("cuda", layer, torch.bfloat16, 1000)
    assert kernels_of(parts).part_tokens < 500 <= kernels_of(whole).part_tokens
    batch = layers.random_batch(layer, 1000, torch.bfloat16)
    ids = batch.ids.clone()
    ids[::9, 1] = 99
    batch = Batch(batch.x, batch.weights, ids)
    prefill = (torch.arange(1000) % 3 == 0).to(torch.uint8)
    present = range(0, 32, 2)
    for live in (1000, 600, 100, 0):
        counts = torch.full((32, 2), -1, dtype=torch.int32, device=parts.device)
        tally = torch.zeros(2, dtype=torch.int32, device=parts.device)
        pool, slots = layers.placed(layer, parts.device, order=present)
        options = {"live": live, "pool": pool, "slots": slots, "prefill": prefill}
        kernels_of(parts).poison()
        got = parts.run(batch, counts=counts, tally=tally, **options)  # type: ignore[arg-type]
        assert same_bits(got, whole.run(batch, **options))  # type: ignore[arg-type]
        expected, pairs = layers.counted(ids, 32, live, prefill, present)
        assert (counts.cpu().numpy() == expected - 1).all()
        assert tally.tolist() == pairs
