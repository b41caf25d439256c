"""Kernels of an MoE layer on a GPU against the fewest bytes and operations they need, beside vLLM's own.

    python bench/kernels.py [--shape NAME ...] [--codec w2 fp4 bf16] [--tokens N ...] [--no-peers] [--seconds 90]

A layer is resolve, both GEMMs and combine. A CUDA graph runs many layers with different routing over gigabytes of
rows, so that no cache serves them; its time over the number of layers counts. The floor is what the layer must read
(codes and scales of the distinct experts routed to) over the read bandwidth measured in the same run, or, where that is
longer, its operations over the measured rate of bfloat16 products. Written to `kernels.json` in the result folder.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench import vllm_peers  # noqa: E402
from bench.gpu_timing import captured, kernel_split, measured_rates, replay_us, spans_of  # noqa: E402
from bench.random_rows import random_rows  # noqa: E402
from bench.results_io import provenance, results_folder, write_json  # noqa: E402
from bench.shapes import SHAPES, MoeShape  # noqa: E402
from ziggurat.kernels.codecs.registry import get_codec  # noqa: E402
from ziggurat.kernels.geometry import ExpertGeometry  # noqa: E402
from ziggurat.stores.packformat import stride_of  # noqa: E402

TOKENS = (1, 2, 4, 8, 16, 512, 2048, 8192)
LAYERS = 2
#: Token counts whose time is also split by kernel.
SPLIT = (1, 8, 8192)
_MARLIN = "marlin"
_BYTES_OF_A_GRAPH = 2e9

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one call: x bfloat16 [T, H], weights float32 [T, k], ids int32 [T, k]; distinct: experts among the ids."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    distinct: int


@dataclass(frozen=True, slots=True)
class Job:
    """layers: what computes layer 0, 1, …; expert_bytes: codes and scales of one expert."""

    name: str
    shape: MoeShape
    layers: tuple[Layer, ...]
    expert_bytes: int


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("kernels: there is no CUDA device", file=sys.stderr)
        return 1
    origin = provenance(["bench/kernels.py", *arguments], at=options.commit)
    device = torch.device("cuda", 0)
    deadline = time.monotonic() + options.seconds
    rates = measured_rates(device)
    print(f"measured: {rates}", flush=True)
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    path = (options.results or results_folder(origin["machine"].get("gpu"))) / "kernels.json"

    def save() -> None:
        what = "microseconds of one MoE layer against its floor, and beside vLLM's kernels"
        write_json(path, {"what": what, "rates": rates, "runs": lines, "notes": notes, **origin})

    for shape_name, kind in _plan(options):
        if time.monotonic() > deadline:
            notes.append(f"{shape_name} {kind}: skipped, the {options.seconds} s were over")
            continue
        try:
            for job in _jobs(SHAPES[shape_name], kind, max(options.tokens), device, notes, options.peers):
                lines += _measure(job, options.tokens, rates, deadline, notes, device)
                save()
        except (ImportError, RuntimeError, ValueError) as error:
            # One kernel that cannot run here must not cost the numbers of the others.
            notes.append(f"{shape_name} {kind}: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        torch.cuda.empty_cache()
    save()
    print(table(lines))
    for note in notes:
        print(f"note: {note}")
    return 0 if lines else 1


def _plan(options: argparse.Namespace) -> list[tuple[str, str]]:
    """What to measure, most wanted first: our quantized kernels at all shapes, then what they are compared with."""
    quantized = [codec for codec in options.codec if codec != "bf16"]
    rest = [codec for codec in options.codec if codec == "bf16"] + ([_MARLIN] if options.peers else [])
    return [(s, k) for kinds in (quantized, rest) for s in options.shape for k in kinds]


def _jobs(
    shape: MoeShape, kind: str, tokens: int, device: torch.device, notes: list[str], peers: bool
) -> Iterator[Job]:
    """The jobs of one kind, over one set of weights."""
    if kind == _MARLIN:
        peer = vllm_peers.marlin_mxfp4(shape, LAYERS, device)
        yield Job(peer.name, shape, peer.layers, peer.expert_bytes)
        return
    geometry = ExpertGeometry(shape.hidden, shape.intermediate)
    row_bytes = get_codec(kind).row_bytes(geometry)
    pool = random_rows(kind, geometry, LAYERS * shape.experts, stride_of(row_bytes), device)
    slots = torch.arange(LAYERS * shape.experts).view(LAYERS, shape.experts)
    ours = _ours(shape, kind, tokens, pool, slots)
    yield Job(f"ziggurat {kind}", shape, ours, row_bytes)
    if kind == "bf16" and peers:
        peer = vllm_peers.triton_bf16(shape, pool, slots)
        error = _difference(ours[0], peer.layers[0], shape, device)
        notes.append(
            f"{shape.name} bf16: relative difference from vLLM's Triton kernel at 16 tokens {error:.1e}"
        )
        yield Job(peer.name, shape, peer.layers, peer.expert_bytes)


def _ours(
    shape: MoeShape, codec: str, tokens: int, pool: torch.Tensor, slots: torch.Tensor
) -> tuple[Layer, ...]:
    """Our kernels over each layer of the slot table, with the counts that a decode step takes."""
    from ziggurat.kernels.cuda.layer import CudaLayerKernels

    device = pool.device
    kernels = CudaLayerKernels(
        codec,
        ExpertGeometry(shape.hidden, shape.intermediate),
        shape.experts,
        shape.top_k,
        dtype=torch.bfloat16,
        device=device,
        max_tokens=tokens,
    )
    counts = torch.zeros(shape.experts, 2, dtype=torch.int32, device=device)
    tally = torch.zeros(2, dtype=torch.int32, device=device)
    prefill = torch.zeros(tokens, dtype=torch.uint8, device=device)
    live = {}

    def layer(table: torch.Tensor) -> Layer:
        def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            count = x.shape[0]
            if count not in live:
                live[count] = torch.tensor([count], dtype=torch.int32, device=device)
            return kernels.run(
                x,
                weights,
                ids,
                slots=table,
                pool=pool,
                live=live[count],
                prefill=prefill,
                counts=counts,
                tally=tally,
            )

        return run

    return tuple(layer(row.to(device, torch.int32)) for row in slots)


def inputs(shape: MoeShape, tokens: int, device: torch.device, seed: int) -> Inputs:
    """Normal activations; k distinct experts for each token, all experts equally likely."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device=device).to(torch.bfloat16)
    scores = torch.rand(tokens, shape.experts, generator=generator, device=device)
    ids = scores.topk(shape.top_k, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(
        torch.randn(tokens, shape.top_k, generator=generator, device=device), dim=-1, dtype=torch.float32
    )
    return Inputs(x, weights, ids, int(ids.unique().numel()))


def _measure(
    job: Job,
    tokens: Sequence[int],
    rates: dict[str, float],
    deadline: float,
    notes: list[str],
    device: torch.device,
) -> list[dict[str, Any]]:
    lines = []
    for count in tokens:
        if time.monotonic() > deadline:
            notes.append(f"{job.shape.name} {job.name}: no time for {count} tokens and more")
            break
        calls = [inputs(job.shape, count, device, seed) for seed in range(_pieces(job, count))]
        graph = captured(
            [_call(job.layers[number % len(job.layers)], call) for number, call in enumerate(calls)]
        )
        us = replay_us(graph, len(calls))
        distinct = sum(call.distinct for call in calls) / len(calls)
        line = {
            "shape": job.shape.name,
            "kernel": job.name,
            "tokens": count,
            "us": round(us, 2),
            **floor(job.shape, count, distinct, job.expert_bytes, us, rates),
        }
        if count in SPLIT:
            line["kernels_us"] = kernel_split(spans_of(graph), len(calls))
        lines.append(line)
        del graph
    return lines


def _call(layer: Layer, call: Inputs) -> Callable[[], object]:
    return lambda: layer(call.x, call.weights, call.ids)


def _pieces(job: Job, tokens: int) -> int:
    """Layers in a graph: enough that together they read far more than a cache holds, few where each is long."""
    nbytes = min(job.shape.experts, tokens * job.shape.top_k) * job.expert_bytes
    return 3 if tokens > 64 else max(4, min(48, math.ceil(_BYTES_OF_A_GRAPH / nbytes)))


def floor(
    shape: MoeShape, tokens: int, distinct: float, expert_bytes: int, us: float, rates: dict[str, float]
) -> dict[str, Any]:
    """What a layer needs at least, and how near `us` comes to it.

    distinct: experts that a layer reads. rates: as `measured_rates` gives them.
    """
    nbytes = distinct * expert_bytes
    bytes_us = nbytes / rates["read_tb_per_s"] / 1e6
    flop_us = shape.flop(tokens) / rates["matmul_tflops"] / 1e6
    floor_us = max(bytes_us, flop_us)
    return {
        "distinct_experts": round(distinct, 2),
        "mb": round(nbytes / 1e6, 2),
        "bytes_floor_us": round(bytes_us, 2),
        "flop_floor_us": round(flop_us, 2),
        "bound": "bytes" if bytes_us >= flop_us else "operations",
        "of_floor": round(floor_us / us, 4),
        "of_copy_floor": round(nbytes / rates["copy_tb_per_s"] / 1e6 / us, 4),
        "tb_per_s": round(nbytes / us / 1e6, 3),
        "tflops": round(shape.flop(tokens) / us / 1e6, 2),
    }


def _difference(one: Layer, other: Layer, shape: MoeShape, device: torch.device) -> float:
    """Relative Frobenius norm of the difference of two layers' results."""
    call = inputs(shape, 16, device, 99)
    results = [layer(call.x, call.weights, call.ids) for layer in (one, other)]
    a, b = (result.float() for result in results if isinstance(result, torch.Tensor))
    return float((a - b).norm() / b.norm())


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The results as lines of text."""
    text = [
        f"{'shape':<19}{'kernel':<20}{'tokens':>7}{'us':>11}{'floor us':>10}{'of floor':>9}{'TB/s':>7}{'TFLOP/s':>9}"
    ]
    text += [
        f"{line['shape']:<19}{line['kernel']:<20}{line['tokens']:>7}{line['us']:>11.1f}"
        f"{max(line['bytes_floor_us'], line['flop_floor_us']):>10.1f}{line['of_floor']:>9.2f}"
        f"{line['tb_per_s']:>7.2f}{line['tflops']:>9.1f}"
        for line in lines
    ]
    return "\n".join(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels of an MoE layer against their floor.")
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(SHAPES), default=["deepseek-v4-flash", "glm-5.2"]
    )
    parser.add_argument("--codec", nargs="+", choices=("w2", "fp4", "bf16"), default=["w2", "fp4", "bf16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave vLLM's kernels out")
    parser.add_argument("--seconds", type=float, default=85.0, help="begin nothing new after that time")
    parser.add_argument("--results", type=Path, default=None, help="folder; default: one named after the GPU")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
