"""How fast experts are packed: source bytes a second for each source format and codec, against a copy of those bytes.

    python bench/codecs.py [--hidden 4096] [--intermediate 2048] [--seconds 2] [--json FILE]

The copy is torch's, of the same buffers and with the same number of threads as the packing uses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.kernels.codecs.registry import codec_names, get_codec
from ziggurat.kernels.codecs.workers import available_cores
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


def rate(work: Callable[[], object], nbytes: int, seconds: float) -> float:
    """Bytes a second of the median run."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return nbytes / sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--sources", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(available_cores())
    geometry = ExpertGeometry(options.hidden, options.intermediate)
    results = []
    print(f"hidden {options.hidden}, intermediate {options.intermediate}, {available_cores()} threads")
    print(f"{'source':16}{'codec':8}{'packed MB/s':>12}{'copy MB/s':>12}{'ratio':>8}")
    kinds = options.sources or ["bf16", "f16", "f32", "fp8_block", "fp8_block e8m0", "nvfp4", "mxfp4"]
    for kind in kinds:
        up, down = (options.intermediate, options.hidden), (options.hidden, options.intermediate)
        expert = Expert(make_weight(kind, *up), make_weight(kind, *up), make_weight(kind, *down))
        original = torch.randint(0, 255, (expert.nbytes,), dtype=torch.uint8)
        duplicate = torch.empty_like(original)
        for name in codec_names():
            codec = get_codec(name)
            row = torch.empty(codec.row_bytes(geometry), dtype=torch.uint8)
            copy = rate(lambda d=duplicate, o=original: d.copy_(o), expert.nbytes, options.seconds / 2)  # type: ignore[misc]
            packed = rate(
                lambda c=codec, e=expert, r=row: c.encode(e, 1, {0: r}), expert.nbytes, options.seconds
            )  # type: ignore[misc]
            print(f"{kind:16}{name:8}{packed / 1e6:12.0f}{copy / 1e6:12.0f}{packed / copy:8.2f}", flush=True)
            results.append(
                {"source": kind, "codec": name, "packed_MB_s": packed / 1e6, "copy_MB_s": copy / 1e6}
            )
    if options.json:
        options.json.write_text(
            json.dumps({"threads": available_cores(), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
