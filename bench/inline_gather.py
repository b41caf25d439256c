"""What rows cost that a layer fetches by itself inside a captured graph, against the pinned link. Needs a CUDA device.

    python bench/inline_gather.py [--codec w2] [--shapes ds4 qwen] [--misses 1 2 4 6 8 16 32]

A graph of a few layers, each routed to so many experts. Before one replay every slot is emptied, so that all of them
are missing; in the next one none is. Reported: bytes over the time of the gathers, from a trace, which begins when the
list of rows is there; bytes over what the misses add to the graph; and what admission adds when nothing is missing,
against the same layers without it. Written to `inline_gather.json` in the result folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.gpu_timing import Span  # noqa: E402
from bench.random_rows import random_rows  # noqa: E402
from bench.results_io import provenance, results_folder, write_json  # noqa: E402
from ziggurat.kernels.admission import COPIES, Admission, make_admission  # noqa: E402
from ziggurat.kernels.codecs.registry import get_codec  # noqa: E402
from ziggurat.kernels.geometry import ExpertGeometry  # noqa: E402
from ziggurat.residency.geometry import ServiceGeometry  # noqa: E402
from ziggurat.residency.placement import Placement, map_arena, open_arena, open_kernels, open_pool  # noqa: E402
from ziggurat.residency.ports import LayerKernels  # noqa: E402
from ziggurat.stores.packformat import stride_of  # noqa: E402

SHAPES = {"ds4": ExpertGeometry(4096, 2048), "qwen": ExpertGeometry(2048, 768)}
"""DeepSeek-V4-Flash's experts, w2 rows of 6.75 MiB, and Qwen3-30B-A3B's, of 1.27 MiB."""
LAYERS, EXPERTS, MOST_K = 8, 256, 8
_REPEATS = 9
_GATHER, _ROUTE = "gather_missing", "route"


@dataclass(slots=True)
class Layers:
    """A few layers, each routed to `misses` experts of its own; everything a graph of them reads and writes."""

    kernels: LayerKernels
    admission: Admission
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    live: torch.Tensor
    counts: torch.Tensor
    tally: torch.Tensor

    def empty(self) -> None:
        """Nothing has a slot."""
        self.admission.table.fill_(-1)
        self.admission.owners.fill_(-1)

    def run(self, admission: Admission | None) -> torch.Tensor:
        """All layers, one behind the other; admission: None = what has a slot is computed, and nothing is fetched."""
        x = self.x
        for layer in range(self.ids.shape[0]):
            x = self.kernels.run(
                x,
                self.weights,
                self.ids[layer],
                slots=self.admission.table[layer],
                pool=self.admission.pool,
                live=self.live,
                prefill=None,
                counts=self.counts[layer],
                tally=self.tally,
                admission=admission,
                layer=layer,
            )
        return x

    def missing(self) -> int:
        """Rows that the layer that ran last has fetched."""
        return int(self.admission.state[COPIES])


def layers_of(
    kernels: LayerKernels,
    place: Placement,
    codec: str,
    geometry: ExpertGeometry,
    misses: int,
    arena: torch.Tensor,
    pool: torch.Tensor,
    layers: int = LAYERS,
    experts: int = EXPERTS,
) -> Layers:
    """Layers whose experts have places in `arena`, uint8 [at least layers * misses, stride], one behind the other."""
    tokens, k = batch_of(misses)
    device = place.device
    generator = torch.Generator().manual_seed(misses)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:misses] for _ in range(layers)])
    admission = make_admission(layers, experts, arena, pool)
    keys = (chosen + experts * torch.arange(layers)[:, None]).reshape(-1)
    places = torch.full((layers * experts,), -1, dtype=torch.int32)
    places[keys] = torch.randperm(len(keys), generator=generator).int()
    admission.places.copy_(places)
    return Layers(
        kernels,
        admission,
        torch.randn(tokens, geometry.hidden, generator=generator).to(device, place.dtype),
        torch.full((tokens, k), 1 / k, device=device),
        chosen.view(layers, tokens, k).to(device, torch.int32),
        torch.full((1,), tokens, dtype=torch.int32, device=device),
        torch.zeros(layers, experts, 2, dtype=torch.int32, device=device),
        torch.zeros(3, dtype=torch.int32, device=device),
    )


def batch_of(misses: int) -> tuple[int, int]:
    """Tokens and choices of each that name so many experts, each once."""
    tokens = -(-misses // MOST_K)
    if misses % tokens:
        raise ValueError(f"{misses} experts are not the same number for each of {tokens} tokens")
    return tokens, misses // tokens


def measure(
    place: Placement, codec: str, name: str, misses: Sequence[int], link: Callable[[], float]
) -> list[dict[str, Any]]:
    """All numbers of misses of one shape, over one arena."""
    geometry, coder = SHAPES[name], get_codec(codec)
    stride = stride_of(coder.row_bytes(geometry))
    rows = LAYERS * max(misses)
    arena = open_arena(place, rows, stride, kind="pinned", numa="gpu-local", on_limit="refuse")
    pool = open_pool(place, rows, stride)
    found = []
    try:
        arena.tensor.copy_(random_rows(codec, geometry, rows, stride, torch.device("cpu")))
        view = map_arena(place, arena).view
        if view is None:
            raise RuntimeError("the arena is not mapped")
        for count in misses:
            tokens, k = batch_of(count)
            sizes = ServiceGeometry(
                LAYERS, EXPERTS, k, geometry.hidden, geometry.intermediate, tuple(range(LAYERS))
            )
            kernels = open_kernels(place, sizes, coder)
            assert kernels is not None
            layers = layers_of(kernels, place, codec, geometry, count, view, pool.tensor[: LAYERS * count])
            said = {"shape": name, "row_bytes": stride, "misses": count, "tokens": tokens}
            found.append({**said, **_one(layers, stride, link())})
            print(line(found[-1]), flush=True)
    finally:
        torch.cuda.synchronize()
        arena.close()
        pool.close()
    return found


def _one(layers: Layers, stride: int, link: float) -> dict[str, Any]:
    """Microseconds of a layer, and shares of the link."""
    from bench.gpu_timing import captured, kernel_split, spans_of

    layers.empty()
    admitted = captured([lambda: layers.run(layers.admission)])
    plain = captured([lambda: layers.run(None)])
    misses = layers.ids[0].numel()
    layers.empty()
    admitted.replay()
    torch.cuda.synchronize()
    if layers.missing() != misses:
        raise RuntimeError(f"{layers.missing()} rows were fetched, not {misses}")
    times: dict[str, list[float]] = {"missing": [], "present": [], "plain": []}
    for _ in range(_REPEATS):
        layers.empty()
        times["missing"].append(_us(admitted))
        times["present"].append(_us(admitted))
        times["plain"].append(_us(plain))
    us = {name: median(each) / LAYERS for name, each in times.items()}
    layers.empty()
    torch.cuda.synchronize()
    spans = spans_of(admitted)
    split = kernel_split(spans, LAYERS)
    gather = next((time for kernel, time in split.items() if kernel.startswith(_GATHER)), None)
    copying = copying_us(spans)
    nbytes = misses * stride
    return {
        "link_gb_per_s": link,
        "layer_us": {name: round(one, 2) for name, one in us.items()},
        "gather_us": gather,
        "copying_us": None if copying is None else round(copying, 3),
        "gather_of_link": None if copying is None else round(nbytes / copying / 1e3 / link, 4),
        "added_of_link": round(nbytes / (us["missing"] - us["present"]) / 1e3 / link, 4),
        "ratio": round(us["missing"] / (us["plain"] + nbytes / link / 1e3), 4),
        "idle_overhead": round(us["present"] / us["plain"] - 1, 4),
        "kernels_us": split,
    }


def copying_us(spans: Sequence[Span]) -> float | None:
    """Microseconds of a gather from when it knows what to copy: it starts early, beside the route kernel that lists the
    rows, and waits for its end. The median over the gathers of a trace; None if it has none."""
    times = []
    listed = float("-inf")
    for span in spans:
        if span.name.startswith(_ROUTE):
            listed = span.end
        elif span.name.startswith(_GATHER):
            times.append(span.end - max(span.start, listed))
    return median(times) if times else None


def _us(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay on an idle device."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def line(run: dict[str, Any]) -> str:
    """A run in one line of text."""
    us = run["layer_us"]
    gather = "no trace"
    if run["gather_us"] is not None:
        gather = f"{run['copying_us']:.1f} us, {run['gather_of_link']:.2f} of the link"
    return (
        f"{run['shape']}, {run['misses']} misses ({run['tokens']} tokens): layer {us['plain']:.1f} us plain, "
        f"{us['present']:.1f} admitting ({run['idle_overhead']:+.1%}), {us['missing']:.1f} missing; gather {gather}; "
        f"added bytes at {run['added_of_link']:.2f} of the link, ratio {run['ratio']:.3f}"
    )


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    origin = provenance(["bench/inline_gather.py", *arguments], at=options.commit)
    from bench.harness.run import link_gb_per_s

    device = torch.device("cuda", 0)
    began = time.monotonic()
    place = Placement(device, torch.bfloat16, max(batch_of(count)[0] for count in options.misses))
    runs = []
    for name in options.shapes:
        runs += measure(place, options.codec, name, options.misses, lambda: link_gb_per_s(device))
    path = (options.results or results_folder(origin["machine"].get("gpu"))) / "inline_gather.json"
    write_json(
        path,
        {
            "what": "layers that fetch their missing rows inside a captured graph",
            "codec": options.codec,
            "layers": LAYERS,
            "runs": runs,
            "seconds": round(time.monotonic() - began, 1),
            **origin,
        },
    )
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codec", choices=("w2", "fp4", "bf16"), default="w2")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--misses", type=int, nargs="+", default=[1, 2, 4, 6, 8, 16, 32], help="of a layer")
    parser.add_argument("--results", type=Path, default=None, help="folder; default: one named after the GPU")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
