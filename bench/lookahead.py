"""Whether a layer's experts can be guessed while the layer before it runs, and what that would be worth. On the CPU.

    python bench/lookahead.py [--windows 32] [--tokens 1 8]

The demo model reads held-out text. In each layer the next one's norm and router are applied to hidden states that are
known before it runs; the first k/2, k or 2 k choices are the guess. A simulated pool under the device's rules says
which experts would have been missing. What right and wrong guesses are worth in time comes from a small model with
an H200's times for DeepSeek-V4-Flash in w2, as measured by `bench/kernels.py` and `bench/transfers.py`. Written to
`bench/results/lookahead.json`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from bench.heldout_text import cut_windows, read_documents, token_stream  # noqa: E402
from bench.lookahead_model import (  # noqa: E402
    IdArray,
    LayerMisses,
    Moment,
    Times,
    limit_us,
    misses,
    step_us,
)
from bench.results_io import RESULTS, provenance, read_json, write_json  # noqa: E402
from bench.synthetic import write_bf16_copy  # noqa: E402
from ziggurat.kernels.admission import CANDIDATES, HALF_LIFE  # noqa: E402
from ziggurat.residency.admission_model import AdmissionModel  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
TEXT = ROOT / "bench" / "models" / "heldout.txt.xz"
COVERAGES = (0.5, 0.25, 0.19)
MEASURED = RESULTS / "h200"
SHAPE, CODEC_KERNEL, ROW_BYTES = "deepseek-v4-flash", "ziggurat w2", 6912 << 10
DENSE_BYTES = 150e6  # of a layer's attention and shared expert, in bytes read
_WARM = 64  # steps before what is counted
_TRACED, _TRACED_RANKS = 192, 6  # positions and guesses of a trace


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    origin = provenance(["bench/lookahead.py", *arguments], at=options.commit)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ziggurat-lookahead-") as name:
        folder = Path(name) / "demo"
        write_bf16_copy(MODEL, folder)
        from bench.lookahead_guesses import routed_and_guessed

        windows = [window[:-1] for window in cut_windows(_stream(folder), options.windows)]
        ids, guesses = routed_and_guessed(folder, windows)
    if options.trace is not None:
        write_trace(options.trace, ids, guesses[Moment.MOE_INPUT])
        return 0
    runs = []
    for tokens in options.tokens:
        times = measured_times(tokens)
        for coverage in COVERAGES:
            for moment in Moment:
                for width in (ids.shape[-1] // 2, ids.shape[-1], 2 * ids.shape[-1]):
                    guess = guesses[moment][..., :width]
                    run = judge(ids, guess, tokens, coverage, moment, times)
                    runs.append({"guesses": width, **run})
                    print(line(runs[-1]), flush=True)
    result = {
        "what": "experts of the next layer guessed from hidden states that are known before it runs",
        "model": MODEL.name,
        "rules": {"candidates": CANDIDATES, "half_life": HALF_LIFE},
        "runs": runs,
        "seconds": round(time.perf_counter() - started, 1),
        **origin,
    }
    write_json(options.output, result)
    return 0


def write_trace(path: Path, ids: IdArray, guesses: IdArray) -> None:
    """Routing with guesses, for `bench/harness/inline.py --lookahead`: `topk_ids` uint8 [sequences, positions, L, k],
    and `guesses` [.., L, ranks]; layer 0 has none."""
    part = (slice(None), slice(None, _TRACED))
    np.savez_compressed(
        path, topk_ids=ids[part].astype(np.uint8), guesses=guesses[part][..., :_TRACED_RANKS].astype(np.uint8)
    )
    print(f"{path}: {_TRACED} positions of {len(ids)} sequences", flush=True)


def judge(
    ids: IdArray, guesses: IdArray, tokens: int, coverage: float, moment: Moment, times: Times
) -> dict[str, Any]:
    """One pool and one kind of guess. ids [sequences, positions, L, k]; guesses [.., L, width]; layer 0 has none."""
    layers, experts = ids.shape[2], 1 << int(ids.max()).bit_length()
    slots = round(layers * experts * coverage)
    pool = AdmissionModel(layers, experts, slots)
    found: list[list[LayerMisses]] = []
    for first in range(0, ids.shape[0] - tokens + 1, tokens):
        batch = slice(first, first + tokens)
        for position in range(ids.shape[1]):
            here, ahead = ids[batch, position].swapaxes(0, 1), guesses[batch, position].swapaxes(0, 1)
            found.append(misses(here, [None, *ahead[1:]], pool))
    found = found[_WARM:]
    guessable = [layer for step in found for layer in step[1:]]
    routed = sum(len(layer.routed) for layer in guessable)
    missing = sum(len(layer.missing) for layer in guessable)
    caught = sum(len(layer.missing.intersection(layer.guessed)) for layer in guessable)
    fetched = sum(len(layer.guessed) for layer in guessable)
    plain = [[LayerMisses(layer.routed, layer.missing) for layer in step] for step in found]
    perfect = [[LayerMisses(one.routed, one.missing, tuple(one.missing)) for one in step] for step in found]

    def mean_us(steps: list[list[LayerMisses]], *, cancel: bool = False) -> float:
        each: list[float] = [step_us(step, times, moment, cancel=cancel) for step in steps]
        return float(round(sum(each) / len(each) / layers, 1))

    return {
        "tokens": tokens,
        "coverage": coverage,
        "moment": moment.value,
        "recall": _recall(ids, guesses),
        "recall_missing": round(caught / missing, 4),
        "wrong_share": round((fetched - caught) / max(1, fetched), 4),
        "missing_per_layer": round(missing / len(guessable), 3),
        "missed_share": round(missing / routed, 4),
        "wrong_per_layer": round((fetched - caught) / len(guessable), 3),
        "times_us": {"dense": times.dense, "moe": times.moe, "row": times.row},
        "layer_us": {
            "without": mean_us(plain),
            "with": mean_us(found),
            "cancelled": mean_us(found, cancel=True),
            "perfect": mean_us(perfect),
            "limit": round(float(np.mean([limit_us(step, times) for step in plain])) / layers, 1),
        },
    }


def _recall(ids: IdArray, guesses: IdArray) -> float:
    """Share of a token's routed experts that are among its guesses, layer 0 left out."""
    hits = (ids[:, :, 1:, :, None] == guesses[:, :, 1:, None, :]).any(-1)
    return round(float(hits.mean()), 4)


def measured_times(tokens: int) -> Times:
    """Of one layer, from the H200's result files."""
    kernels = read_json(MEASURED / "kernels.json")
    transfers = read_json(MEASURED / "transfers.json")
    moe = next(
        run["us"]
        for run in kernels["runs"]
        if (run["shape"], run["kernel"], run["tokens"]) == (SHAPE, CODEC_KERNEL, tokens)
    )
    link = transfers["transfers"]["peak_gb_per_s"]
    dense = DENSE_BYTES / kernels["rates"]["read_tb_per_s"] / 1e6
    return Times(round(dense, 1), round(moe, 1), round(ROW_BYTES / link / 1e3, 1))


def _stream(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return token_stream(
        read_documents(TEXT), lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )


def line(run: dict[str, Any]) -> str:
    """A run in one line of text."""
    us = run["layer_us"]
    return (
        f"{run['tokens']} tokens, {run['coverage']:.0%}, {run['moment']}, {run['guesses']} guesses: recall "
        f"{run['recall']:.1%}, of the missing {run['recall_missing']:.1%}, {run['wrong_share']:.0%} of the fetched "
        f"wrong; layer {us['without']} us without, {us['with']} with, {us['cancelled']} if wrong ones are cancelled, "
        f"{us['perfect']} if none is wrong, limit {us['limit']}"
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=32, help="of 512 tokens of held-out text")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8], help="sequences decoded together")
    parser.add_argument("--trace", type=Path, default=None, help="write routing and guesses there, no more")
    parser.add_argument("--output", type=Path, default=RESULTS / "lookahead.json")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    if options.windows < max(options.tokens):
        parser.error("--windows has to be at least --tokens")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
