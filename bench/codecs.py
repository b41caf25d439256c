"""How fast experts are packed: source bytes a second for each source format and codec, against a copy of those bytes.

    python bench/codecs.py [--hidden 4096] [--intermediate 2048] [--seconds 2] [--json FILE]

The copy is torch's, of as many bytes and with as many threads. Nothing is read from or written to a disk.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ziggurat.kernels.codecs.base import Codec
from ziggurat.kernels.codecs.registry import codec_names, get_codec
from ziggurat.kernels.geometry import ExpertGeometry


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

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scale, self.scale_2)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True)
class Expert:
    """Satisfies kernels' ExpertSource."""

    w1: Weight
    w3: Weight
    w2: Weight

    @property
    def nbytes(self) -> int:
        return self.w1.nbytes + self.w3.nbytes + self.w2.nbytes


def make_weight(kind: str, rows: int, cols: int) -> Weight:
    """Normally distributed weights of standard deviation 0.02 as a checkpoint of that kind stores them."""
    values = torch.randn(rows, cols) * 0.02
    if kind in ("bf16", "f16", "f32"):
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]
        return Weight("w", kind, (rows, cols), values.to(dtype))
    if kind in ("fp8_block", "fp8_block e8m0"):
        tiles = values.reshape(rows // 128, 128, cols // 128, 128)
        scale = tiles.abs().amax(dim=(1, 3)) / 448
        if kind.endswith("e8m0"):
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        data = (tiles / scale[:, None, :, None]).reshape(rows, cols).to(torch.float8_e4m3fn)
        return Weight("w", "fp8_block", (rows, cols), data, scale, None, (128, 128))
    width = 32 if kind == "mxfp4" else 16
    blocks = values.reshape(rows, cols // width, width)
    scale = blocks.abs().amax(dim=2) / 6
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    nibbles = torch.bucketize((blocks / scale[..., None]).abs(), midpoints).to(torch.uint8)
    nibbles = (nibbles | ((blocks < 0).to(torch.uint8) << 3)).reshape(rows, cols)
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    if kind == "mxfp4":
        bytes_ = (torch.round(torch.log2(scale)) + 127).to(torch.uint8)
        return Weight("w", kind, (rows, cols), pairs, bytes_)
    scale_2 = scale.max() / 448
    return Weight("w", kind, (rows, cols), pairs, (scale / scale_2).to(torch.float8_e4m3fn), scale_2)


def rate(work: Callable[[], object], nbytes: int, seconds: float) -> tuple[float, float]:
    """Megabytes (10^6) a second of the quickest run, by the clock and by one core's processor time.

    The second tells what the work costs on a machine that others use too.
    """
    work()
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + seconds
    while len(wall) < 5 or time.perf_counter() < end:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return nbytes / min(wall) / 1e6, nbytes / min(cpu) / 1e6


def pack(codec: Codec, experts: list[Expert], rows: list[torch.Tensor]) -> None:
    for expert, row in zip(experts, rows, strict=True):
        codec.encode(expert, 1, {0: row})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--megabytes", type=float, default=100.0, help="source bytes of one run")
    parser.add_argument("--sources", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    geometry = ExpertGeometry(options.hidden, options.intermediate)
    results = []
    print(
        f"hidden {options.hidden}, intermediate {options.intermediate}, {len(os.sched_getaffinity(0))} threads"
    )
    print(
        f"{'source':16}{'codec':6}{'MB/s':>8}{'copy':>8}{'ratio':>7}{'MB/core-s':>11}{'copy':>8}{'ratio':>7}"
    )
    kinds = options.sources or ["bf16", "f16", "f32", "fp8_block", "fp8_block e8m0", "nvfp4", "mxfp4"]
    for kind in kinds:
        up, down = (options.intermediate, options.hidden), (options.hidden, options.intermediate)
        # As many experts as a cache does not hold, so that sources come from memory as they do in a checkpoint.
        experts = [Expert(make_weight(kind, *up), make_weight(kind, *up), make_weight(kind, *down))]
        while sum(e.nbytes for e in experts) < options.megabytes * 1e6:
            experts.append(copy.deepcopy(experts[0]))
        nbytes = sum(e.nbytes for e in experts)
        original = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        duplicate = torch.empty_like(original)
        for name in codec_names():
            codec = get_codec(name)
            rows = [torch.empty(codec.row_bytes(geometry), dtype=torch.uint8) for _ in experts]
            copied = rate(partial(duplicate.copy_, original), nbytes, options.seconds / 2)
            packed = rate(partial(pack, codec, experts, rows), nbytes, options.seconds)
            by_clock, by_core = packed[0] / copied[0], packed[1] / copied[1]
            print(
                f"{kind:16}{name:6}{packed[0]:8.0f}{copied[0]:8.0f}{by_clock:7.2f}"
                f"{packed[1]:11.0f}{copied[1]:8.0f}{by_core:7.2f}",
                flush=True,
            )
            results.append(
                {
                    "source": kind,
                    "codec": name,
                    "packed_MB_s": round(packed[0]),
                    "copy_MB_s": round(copied[0]),
                    "packed_MB_core_s": round(packed[1]),
                    "copy_MB_core_s": round(copied[1]),
                }
            )
    if options.json:
        options.json.write_text(
            json.dumps({"threads": len(os.sched_getaffinity(0)), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
