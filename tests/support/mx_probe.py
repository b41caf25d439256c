"""A kernel around the emulated block-scaled instruction: one warp, its registers from memory."""

from __future__ import annotations

import ctypes
from typing import Final

from ziggurat.kernels.cuda import nvrtc
from ziggurat.kernels.cuda.units import SOURCES

NAME: Final = "mx_probe"
_SOURCE: Final = """
#include "emulate.cuh"
struct Probe { const uint4* a; const uint2* b; const u32* scale_a; const u32* scale_b; const float4* c; float4* d; };
extern "C" __global__ void mx_probe(const __grid_constant__ Probe p) { // block i: instruction i, under byte i % 4
    const int at = blockIdx.x * 32 + threadIdx.x;
    const uint4 a = p.a[at];
    const uint2 b = p.b[at];
    const float4 c = p.c[at];
    const u32 rows[4] = {a.x, a.y, a.z, a.w}, columns[2] = {b.x, b.y};
    float d[4] = {c.x, c.y, c.z, c.w};
    mma_mx_emulated(d, rows, columns, p.scale_a[at], p.scale_b[at], blockIdx.x & 3);
    p.d[at] = make_float4(d[0], d[1], d[2], d[3]);
}
"""


class ProbeParams(ctypes.Structure):
    """Addresses of arrays with one element for each lane of each instruction."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "scale_a", "scale_b", "c", "d")]


def compiled(target: str) -> nvrtc.Compiled:
    """The probe for a target such as sm_90; with the real instruction's registers and the emulation's arithmetic."""
    return nvrtc.compile_source(
        "probe.cu", {"probe.cu": _SOURCE, **nvrtc.sources_of("emulate.cuh", SOURCES)}, target
    )
