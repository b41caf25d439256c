"""The committed images: made of these sources, nothing spilled, the matrix instruction of sm_120 where it belongs.

Whether their bytes are what the sources give, `bash .ci/run images` tells.
"""

from __future__ import annotations

import ctypes
import hashlib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from support import sass
from ziggurat.kernels.cuda import images, layer, manifest, nvrtc
from ziggurat.kernels.cuda.gather import GatherParams
from ziggurat.kernels.cuda.lookahead import GuessParams
from ziggurat.kernels.cuda.params import LayerParams
from ziggurat.kernels.cuda.units import IMAGES, SHARED_LIMITS, SOURCES, TARGETS, UNITS, Unit

# One block-scaled matrix instruction: 16 x 8 x 32, E5M2 weights, E4M3 activations, a UE8M0 scale per 32 of k.
BLOCK_SCALED = "QMMA.SF.16832.F32.E5M2.E4M3.E8"
GEMMS = ("gate_up_*_mx", "down_*_mx")

CODE = [(u.name, target) for u in UNITS for target in u.targets]


@cache
def opcodes(name: str, target: str) -> dict[str, list[str]]:
    return sass.opcodes(IMAGES / manifest.read(IMAGES).units[name].image, target)


def test_there_is_an_image_of_every_unit_and_no_other() -> None:
    listed = manifest.read(IMAGES)
    assert sorted(listed.units) == sorted(u.name for u in UNITS)
    files = {path.name for path in IMAGES.iterdir()}
    assert files == {manifest.FILE, *(record.image for record in listed.units.values())}
    assert (listed.nvrtc, listed.nvfatbin, listed.options) == (images.NVRTC, images.NVFATBIN, nvrtc.OPTIONS)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_manifest_tells_of_these_files(unit: Unit) -> None:
    record = manifest.read(IMAGES).units[unit.name]
    content = (IMAGES / record.image).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (record.size, record.sha256)
    assert record.defines == unit.defines
    assert sorted(record.targets) == sorted(unit.targets)
    digests = {
        name: hashlib.sha256(text.encode()).hexdigest()
        for name, text in nvrtc.sources_of(unit.source, SOURCES).items()
    }
    assert record.sources == digests, "rebuild: python -m ziggurat.kernels.build"


def test_every_source_is_part_of_a_unit() -> None:
    used = {name for u in UNITS for name in nvrtc.sources_of(u.source, SOURCES)}
    assert {path.name for path in SOURCES.iterdir()} == used


@pytest.mark.parametrize(("name", "target"), CODE)
def test_an_image_holds_the_kernels_that_the_manifest_lists(name: str, target: str) -> None:
    listed = manifest.read(IMAGES).units[name].targets[target]
    assert listed
    assert sorted(opcodes(name, target)) == sorted(listed)


#: Bytes of a thread's stack that a kernel of the 16-bit path may use: a few registers, saved outside its inner loops
#: for one more block on a multiprocessor (decode), or because 64 columns and two tiles need all there are (prefill).
SPILLED = {"decode": 32, "prefill": 144}


@pytest.mark.parametrize(("name", "target"), CODE)
def test_no_kernel_spills_on_sm_120_and_hardly_any_elsewhere(name: str, target: str) -> None:
    told = manifest.read(IMAGES).units[name].targets[target]
    code = opcodes(name, target)
    assert all(len(instructions) > 10 for instructions in code.values())
    for kernel, record in told.items():
        kind = next((kind for kind in SPILLED if f"_{kind}_" in kernel), None)
        allowed = 0 if target == "sm_120f" or kind is None else SPILLED[kind]
        assert record.stack <= allowed, kernel
        if allowed == 0:
            assert (record.spill_stores, record.spill_loads) == (0, 0), kernel
            assert sass.local_accesses(code[kernel]) == [], kernel


@pytest.mark.parametrize("pattern", GEMMS)
def test_both_gemms_use_the_block_scaled_instruction_on_sm_120(pattern: str) -> None:
    found = {
        name: code
        for u in UNITS
        for name, code in opcodes(u.name, "sm_120f").items()
        if fnmatch(name, pattern)
    }
    assert found, f"no kernel of sm_120f is called {pattern}"
    for name, code in found.items():
        assert code.count(BLOCK_SCALED) > 0, name
        others = {opcode for opcode in code if "MMA" in opcode and opcode != BLOCK_SCALED}
        assert others == set(), f"{name} multiplies with {others} as well"


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_120f"])
def test_no_other_target_has_block_scaled_kernels(target: str) -> None:
    kernels = [name for u in UNITS if target in u.targets for name in opcodes(u.name, target)]
    assert kernels
    assert [name for name in kernels if name.endswith("_mx")] == []


def test_structs_are_as_long_as_the_kernels_parameters() -> None:
    found = manifest.read(IMAGES).units.values()
    kernels = [item for one in found for target in one.targets.values() for item in target.items()]
    for name, record in kernels:
        struct: type[ctypes.Structure] = GatherParams if name == "gather_rows" else LayerParams
        struct = GuessParams if name.endswith("_guesses") else struct
        assert record.parameter == ctypes.sizeof(struct), name


@pytest.mark.parametrize("target", TARGETS)
def test_the_decode_kernels_fit_the_shared_memory_of_every_target(target: str) -> None:
    """What the H200 cannot show: its blocks have twice the memory of those of smaller GPUs."""
    kernels = manifest.read(IMAGES).units["moe"].targets[target]
    needed = {
        name: record.shared + layer.decode_shared(name.split("_decode_")[1].split("_")[0])
        for name, record in kernels.items()
        if "_decode_" in name
    }
    assert needed
    assert {name: size for name, size in needed.items() if size > SHARED_LIMITS[target]} == {}


def test_the_checks_see_a_spill_and_the_instruction(tmp_path: Path) -> None:
    """What they look for, on code that has it."""
    source = """
struct P { float* out; const unsigned* in; int n; };
extern "C" __global__ void __launch_bounds__(1024) spills(const __grid_constant__ P p) {
    float held[64];
    for (int i = 0; i < 64; ++i) held[i] = p.out[i * 1024 + threadIdx.x];
    for (int i = 0; i < p.n; ++i) held[p.in[i] & 63] += held[i & 63];
    for (int i = 0; i < 64; ++i) p.out[i * 1024 + threadIdx.x] = held[i];
}
extern "C" __global__ void gate_up_tiny_mx(const __grid_constant__ P p) {
    float d[4] = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 1200
    unsigned a = p.in[threadIdx.x], b = p.in[threadIdx.x + 32];
    asm volatile("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e5m2.e4m3.f32.ue8m0 "
                 "{%0,%1,%2,%3},{%4,%4,%4,%4},{%5,%5},{%0,%1,%2,%3},%4,{0,0},%5,{0,0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));
#endif
    p.out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
    (tmp_path / "probe.cu").write_text(source)
    image, record = images.build_unit(Unit("probe", "probe.cu", targets=("sm_90", "sm_120f")), tmp_path)
    path = tmp_path / record.image
    path.write_bytes(image)
    for target in ("sm_90", "sm_120f"):
        code = sass.opcodes(path, target)
        assert sass.local_accesses(code["spills"])
        assert record.targets[target]["spills"].stack > 0
        assert sass.local_accesses(code["gate_up_tiny_mx"]) == []
        assert code["gate_up_tiny_mx"].count(BLOCK_SCALED) == (target == "sm_120f")
