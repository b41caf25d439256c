"""The model of the block-scaled matrix instruction: against exact fractions, and its C++ twin against it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from support import mx_probe
from support import scalar_mx as scalar
from ziggurat.kernels.cpu import block_scaled
from ziggurat.kernels.cpu.block_scaled import E5M2_VALUES, matmul, multiply_block, toward_zero
from ziggurat.kernels.cpu.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from ziggurat.kernels.formats import E8M0_VALUES, U8

SOURCE = Path(block_scaled.__file__).resolve().parents[1] / "cuda" / "src" / "emulate.cuh"


def vectors(rng: np.random.Generator, count: int, kind: str) -> tuple[U8, U8, U8, U8, npt.NDArray[np.uint32]]:
    """a [n, 32], b [n, 32], scales [n] each, bits of c [n]: of products and c of like size, mostly."""
    a, b = (rng.integers(0, 256, (count, 32)).astype(np.uint8) for _ in range(2))
    if kind != "special":
        a[a & 0x7C == 0x7C] &= 0x83
        b[b & 0x7F == 0x7F] &= 0x80
    if kind == "weights":  # as 2-bit codes unfold
        a &= 0x88
        a |= 0x30
    if kind == "sparse":
        a[rng.random(a.shape) < 0.9] = 0
        b[rng.random(b.shape) < 0.5] &= 0x87  # subnormal
    scale_a = rng.integers(100, 155, count).astype(np.uint8)
    scale_b = rng.integers(100, 155, count).astype(np.uint8)
    if kind == "extreme":
        scale_a, scale_b = (rng.choice([0, 1, 127, 253, 254], count).astype(np.uint8) for _ in range(2))
    if kind == "special":
        scale_a[::17] = 255
        scale_b[5::19] = 255
    c = rng.standard_normal(count).astype(np.float32)
    exponents = scale_a.astype(np.int32) + scale_b - 254 + rng.integers(-30, 30, count)
    with np.errstate(over="ignore", under="ignore"):
        c = np.ldexp(c, exponents).astype(np.float32)
    c[~np.isfinite(c)] = 3e38
    bits = c.view(np.uint32)
    bits[::7] = 0
    if kind == "special":
        bits[3::11] = rng.choice(np.array([0x7F800000, 0xFF800000, 0x7FC00000], np.uint32), bits[3::11].size)
    return a, b, scale_a, scale_b, bits


def modelled(a: U8, b: U8, scale_a: U8, scale_b: U8, c: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Vector by vector: 1 x 1 outputs."""
    results = []
    for i in range(len(a)):
        at = slice(i, i + 1)
        results.append(multiply_block(c[at].view(np.float32)[None], a[at], scale_a[at], b[at], scale_b[at]))
    return np.concatenate(results).ravel().view(np.uint32)


@pytest.mark.parametrize("kind", ["any", "weights", "sparse", "extreme", "special"])
def test_sums_are_those_of_exact_fractions(kind: str) -> None:
    a, b, scale_a, scale_b, c = vectors(np.random.default_rng(1), 400, kind)
    if kind == "special":  # C is finite in the scalar statement
        c[(c & 0x7F800000) == 0x7F800000] = 0x3F800000
    expected = [
        scalar.mma_sum(a[i].tolist(), b[i].tolist(), int(scale_a[i]), int(scale_b[i]), int(c[i]))
        for i in range(len(a))
    ]
    assert modelled(a, b, scale_a, scale_b, c).tolist() == expected


def test_an_instruction_is_its_outputs_one_by_one() -> None:
    a, _, scale_a, _, _ = vectors(np.random.default_rng(2), 16, "any")
    _, b, _, scale_b, _ = vectors(np.random.default_rng(3), 8, "any")
    c = np.random.default_rng(4).standard_normal((16, 8)).astype(np.float32)
    together = multiply_block(c, a, scale_a, b, scale_b)
    for n, t in np.ndindex(16, 8):
        row, column = slice(n, n + 1), slice(t, t + 1)
        one = multiply_block(c[row, column], a[row], scale_a[row], b[column], scale_b[column])
        assert one.view(np.uint32)[0, 0] == together.view(np.uint32)[n, t]


def test_terms_are_cut_off_25_bits_below_the_largest() -> None:
    one, e4m3_one, unit = 0x3C, 0x38, 127  # 1.0 in E5M2 and E4M3, scale 1
    a, b = (np.zeros((1, 32), np.uint8) for _ in range(2))
    a[0, 0], b[0, 0] = one, e4m3_one
    scales = np.array([unit], np.uint8)

    def plus(c: float) -> float:
        return float(multiply_block(np.array([[c]], np.float32), a, scales, b, scales)[0, 0])

    assert plus(2.0**20) == 2.0**20 + 1
    assert plus(2.0**26) == 2.0**26  # 2^26 is held in units of 2, of which 1 is a half
    assert plus(-(2.0**24) - 2) == -(2.0**24)  # the sum -(2^24 + 1) is exact, and cut off to float32
    assert plus(2.0**-30) == 1.0


def test_rounding_is_toward_zero() -> None:
    largest = float(np.finfo(np.float32).max)
    for value, expected in (
        (1 + 2.0**-24, 1.0),
        (1 + 2.0**-23 - 2.0**-40, 1.0),
        (-1 - 2.0**-24, -1.0),
        (2.0**-149 * 1.9, 2.0**-149),
        (-(2.0**-150), -0.0),
        (2.0**128 - 2.0**80, largest),
        (2.0**128, np.inf),
    ):
        assert toward_zero(np.array([value])).tobytes() == np.array([expected], np.float32).tobytes()


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("K", [32, 96, 128, 160, 1024, 1056])
def test_a_product_is_near_the_exact_one(K: int, splits: int) -> None:
    rng = np.random.default_rng(K)
    a = (rng.integers(0, 256, (48, K)).astype(np.uint8) & 0x88) | 0x30
    a_scales = rng.integers(120, 124, (48, K // 32)).astype(np.uint8)
    b, b_scales = quantize_mxfp8(rng.standard_normal((5, K)).astype(np.float32))
    weights = E5M2_VALUES[a].reshape(48, -1, 32) * E8M0_VALUES[a_scales][..., None]
    expected = dequantize_mxfp8(b, b_scales) @ weights.reshape(48, K).T
    got = matmul(a, a_scales, b, b_scales, splits=splits)
    assert got.shape == (5, 48)
    assert np.abs(got - expected).max() < 2e-6 * np.sqrt((expected**2).mean())


def test_the_order_of_a_product_shows() -> None:
    """Splits are contiguous runs of groups of 128, added in order: stated once more by hand."""
    rng = np.random.default_rng(9)
    K = 5 * 128 + 64
    a = rng.integers(0, 0x7C, (16, K)).astype(np.uint8)
    a_scales = rng.integers(100, 150, (16, K // 32)).astype(np.uint8)
    b, b_scales = quantize_mxfp8(rng.standard_normal((3, K)).astype(np.float32))
    parts = []
    for first, last in ((0, 1), (1, 3), (3, 4), (4, 6)):  # 6 groups in 4 runs: w * 6 // 4
        part = np.zeros((16, 3), np.float32)
        for block in range(first * 4, min(last * 4, K // 32)):
            k = slice(32 * block, 32 * block + 32)
            part = multiply_block(part, a[:, k], a_scales[:, block], b[:, k], b_scales[:, block])
        parts.append(part)
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    four = matmul(a, a_scales, b, b_scales, splits=4)
    assert (four == expected.T).all()
    assert not (four == matmul(a, a_scales, b, b_scales, splits=1)).all()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """emulate.cuh's arithmetic, for this machine's CPU."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulate")
    (folder / "host.cpp").write_text(
        "typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;\n"
        f'#include "{SOURCE}"\n'
        'extern "C" void sums(int n, const u32* a, const u32* b, const u32* s, const u32* c, u32* d) {\n'
        "    for (int i = 0; i < n; i++) d[i] = mx_sum(a + 8 * i, b + 8 * i, s[i], s[n + i], c[i]);\n"
        "}\n"
    )
    checks = [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=undefined",
        "-fno-sanitize-recover",
        "-static-libubsan",
    ]
    output = ["-shared", "-fPIC", "-o", str(folder / "host.so"), str(folder / "host.cpp")]
    command = [compiler, "-std=c++17", "-O2", *checks, *output]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "host.so"))


@pytest.mark.parametrize("kind", ["any", "weights", "sparse", "extreme", "special"])
def test_the_kernels_emulation_is_the_model(kind: str, compiled: ctypes.CDLL) -> None:
    a, b, scale_a, scale_b, c = vectors(np.random.default_rng(7), 4000, kind)
    got = np.empty(len(a), np.uint32)
    scales = np.concatenate([scale_a, scale_b]).astype(np.uint32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, scales, c, got)]
    compiled.sums(len(a), *pointers)
    np.testing.assert_array_equal(got, modelled(a, b, scale_a, scale_b, c))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_emulation_compiles_for_gpus_without_the_instruction(target: str) -> None:
    probe = mx_probe.compiled(target)
    assert mx_probe.NAME in probe.usage
    assert probe.warnings == ""
