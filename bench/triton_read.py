"""A kernel that reads memory and does as little else as possible: the ceiling for kernels that stream weights."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_PER_PROGRAM = 16


@triton.jit  # type: ignore[untyped-decorator]
def _read(source, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for step in tl.static_range(STEPS):
        total ^= tl.load(source + start + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, 0))


def read_all(source: torch.Tensor) -> torch.Tensor:
    """Reads uint8 [n] on a CUDA device, n a multiple of 128 KiB; int64 [n / 128 KiB], each piece's exclusive or."""
    words = source.view(torch.int64)
    each = _BLOCK * _PER_PROGRAM
    programs = words.numel() // each
    if words.numel() % each:
        raise ValueError(f"{source.numel()} bytes are no multiple of {each * 8}")
    out = torch.empty(programs, dtype=torch.int64, device=source.device)
    _read[(programs,)](words, out, BLOCK=_BLOCK, STEPS=_PER_PROGRAM, num_warps=8)
    return out
